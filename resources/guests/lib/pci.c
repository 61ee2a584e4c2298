/* Config access, capability lists. */
#include "pci.h"
#include "acpi.h"
#include "runtime.h"

enum { CONFIG_ADDRESS = 0xcf8, CONFIG_DATA = 0xcfc };

struct segment segments[16];
u32 segment_count;
bool config_ports;

void pci_start(void) {
    const struct acpi_header *mcfg = acpi_table("MCFG");
    if (mcfg) {
        for (u64 at = (u64)mcfg + 44; at + 16 <= (u64)mcfg + mcfg->length && segment_count < 16; at += 16) {
            struct segment found = {read64(at), read16(at + 8), read8(at + 10), read8(at + 11)};
            reach(found.ecam + ((u64)found.first_bus << 20), (u64)(found.last_bus - found.first_bus + 1) << 20);
            segments[segment_count++] = found;
        }
    }
    out32(CONFIG_ADDRESS, 0x80000000);
    config_ports = in32(CONFIG_ADDRESS) == 0x80000000;
    require(segment_count || config_ports, "no MCFG table and no port 0xcf8");
    if (!segment_count)
        segments[segment_count++] = (struct segment){0, 0, 0, 255};
}

/* 0 when ECAM does not reach the register. */
static u64 ecam_address(place at, u32 offset) {
    for (u32 i = 0; i < segment_count; i++) {
        struct segment *segment = &segments[i];
        if (segment->ecam && segment->number == at >> 16 && bus_of(at) >= segment->first_bus && bus_of(at) <= segment->last_bus)
            return segment->ecam + ((u64)(at & 0xffff) << 12) + offset;
    }
    return 0;
}

u32 config_read_by_ports(place at, u32 offset, u32 size) {
    out32(CONFIG_ADDRESS, 0x80000000 | at << 8 | (offset & 0xfc));
    u16 port = (u16)(CONFIG_DATA + (offset & 3));
    return size == 1 ? in8(port) : size == 2 ? in16(port) : in32(port);
}

void config_write_by_ports(place at, u32 offset, u32 size, u32 value) {
    out32(CONFIG_ADDRESS, 0x80000000 | at << 8 | (offset & 0xfc));
    u16 port = (u16)(CONFIG_DATA + (offset & 3));
    if (size == 1)
        out8(port, (u8)value);
    else if (size == 2)
        out16(port, (u16)value);
    else
        out32(port, value);
}

u32 config_read(place at, u32 offset, u32 size) {
    u64 address = ecam_address(at, offset);
    if (address)
        return size == 1 ? read8(address) : size == 2 ? read16(address) : read32(address);
    if (offset < 256 && at < 0x10000 && config_ports)
        return config_read_by_ports(at, offset, size);
    return 0xffffffff >> (32 - 8 * size);
}

void config_write(place at, u32 offset, u32 size, u32 value) {
    u64 address = ecam_address(at, offset);
    if (!address) {
        if (offset < 256 && at < 0x10000 && config_ports)
            config_write_by_ports(at, offset, size, value);
    } else if (size == 1)
        write8(address, (u8)value);
    else if (size == 2)
        write16(address, (u16)value);
    else
        write32(address, value);
}

u32 find_capability(place at, u8 id) {
    if (!(config_read(at, 6, 2) & 0x10))
        return 0;
    u32 offset = config_read(at, CAPABILITY_LIST, 1) & 0xfc;
    for (u32 steps = 0; offset >= 0x40 && steps < 48; steps++) {
        u32 head = config_read(at, offset, 2);
        if ((head & 0xff) == id)
            return offset;
        offset = head >> 8 & 0xfc;
    }
    return 0;
}

u32 find_extended_capability(place at, u16 id) {
    u32 offset = 0x100;
    for (u32 steps = 0; offset >= 0x100 && steps < 960; steps++) {
        u32 head = config_read(at, offset, 4);
        if (head == 0 || head == 0xffffffff)
            return 0;
        if ((head & 0xffff) == id)
            return offset;
        offset = head >> 20 & 0xffc;
    }
    return 0;
}

const char *place_name(place at) {
    static char names[4][16];
    static u32 next;
    char *name = names[next++ % 4], *to = name;
    const char *digits = "0123456789abcdef";
    if (at >> 16) {
        for (int shift = 28; shift >= 16; shift -= 4)
            *to++ = digits[at >> shift & 15];
        *to++ = ':';
    }
    *to++ = digits[at >> 12 & 15];
    *to++ = digits[at >> 8 & 15];
    *to++ = ':';
    *to++ = digits[device_of(at) >> 4];
    *to++ = digits[device_of(at) & 15];
    *to++ = '.';
    *to++ = digits[function_of(at)];
    *to = 0;
    return name;
}
