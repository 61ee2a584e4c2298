/* Message interrupts and the stub endpoint's registers. */
#include "device.h"
#include "runtime.h"

enum { MESSAGE_ADDRESS = 0xfee00000 };

u32 msi_vectors(place at) {
    u32 offset = find_capability(at, CAP_MSI);
    return offset ? 1u << (config_read(at, offset + 2, 2) >> 1 & 7) : 0;
}

u32 msix_vectors(place at) {
    u32 offset = find_capability(at, CAP_MSIX);
    return offset ? (config_read(at, offset + 2, 2) & 0x7ff) + 1 : 0;
}

void msi_enable(place at, u8 vector) {
    u32 offset = find_capability(at, CAP_MSI), control = config_read(at, offset + 2, 2);
    u32 data = offset + (control & 0x80 ? 0x0c : 0x08);
    config_write(at, offset + 4, 4, MESSAGE_ADDRESS | apic_id() << 12);
    if (control & 0x80)
        config_write(at, offset + 8, 4, 0);
    config_write(at, data, 2, vector);
    config_write(at, offset + 2, 2, (control & ~0x70u) | 1);
}

void msi_disable(place at) {
    u32 offset = find_capability(at, CAP_MSI);
    config_write(at, offset + 2, 2, config_read(at, offset + 2, 2) & ~1u);
}

/* Address of the table (word 4) or of the pending bits (word 8). */
static u64 msix_area(struct function *function, u32 word) {
    u32 offset = find_capability(function->at, CAP_MSIX);
    u32 where = config_read(function->at, offset + word, 4);
    u32 bir = where & 7;
    require(bir < 6 && function->bars[bir].kind >= BAR_MEM32, "%s: MSI-X in BAR %u", place_name(function->at), bir);
    return function->bars[bir].base + (where & ~7u);
}

u64 msix_entry(struct function *function, u32 index) { return reach(msix_area(function, 4) + 16 * index, 16); }

bool msix_pending(struct function *function, u32 index) {
    return read32(reach(msix_area(function, 8) + index / 32 * 4, 4)) >> (index % 32) & 1;
}

void msix_fill(struct function *function, u32 index, u8 vector) {
    u64 entry = msix_entry(function, index);
    write32(entry, MESSAGE_ADDRESS | apic_id() << 12);
    write32(entry + 4, 0);
    write32(entry + 8, vector);
    write32(entry + 12, 0);
}

void msix_control(place at, u16 bits) {
    u32 offset = find_capability(at, CAP_MSIX);
    u32 control = config_read(at, offset + 2, 2) & ~(u32)(MSIX_ON | MSIX_MASK_ALL);
    config_write(at, offset + 2, 2, control | bits);
}

bool is_stub(struct function *function) {
    struct bar *bar = &function->bars[0];
    if (function->header != 0 || bar->kind < BAR_MEM32 || bar->size < 4096 || !bar->base)
        return false;
    if (!(config_read(function->at, COMMAND, 2) & DECODE_MEMORY))
        return false;
    reach(bar->base, 4096);
    return read32(bar->base + STUB_MAGIC) == STUB_MAGIC_VALUE && read32(bar->base + STUB_VERSION) == 1;
}

struct function *stub(u32 n) {
    for (u32 i = 0; i < function_count; i++)
        if (is_stub(&functions[i]) && n-- == 0)
            return &functions[i];
    return NULL;
}

u32 stub_copy(struct function *function, u64 from, u64 to, u32 bytes, u32 vector) {
    write64(stub_address(function, STUB_SOURCE), from);
    write64(stub_address(function, STUB_DESTINATION), to);
    write32(stub_address(function, STUB_LENGTH), bytes);
    write32(stub_address(function, STUB_VECTOR), vector);
    write32(stub_address(function, STUB_CONTROL), 1);
    u32 control = STUB_BUSY;
    for (u32 tries = 0; tries < 50000 && control & STUB_BUSY; tries++)
        control = read32(stub_address(function, STUB_CONTROL));
    return control;
}

int largest_bar(struct function *function) {
    int best = -1;
    for (int n = 0; n < 6; n++)
        if (function->bars[n].kind >= BAR_MEM32 && function->bars[n].size >= 16384 &&
            (best < 0 || function->bars[n].size > function->bars[best].size))
            best = n;
    return best;
}
