/* The demo guest: finds the PCIe hierarchy by itself, prints it as a tree on the serial port and as facts on port 0xE9
 * (grammar: README.md beside this file), copies between devices, receives their interrupts, and powers off. */
#include "acpi.h"
#include "device.h"
#include "runtime.h"

enum { NO_CLIQUE = -1, COPY_BYTES = 1024 };

/* The NVIDIA peer-to-peer approval capability, read as NVIDIA's driver does: any vendor-specific capability with the
 * signature "P2P" and version 0, wherever it is. Returns the clique and sets `offset`. */
static int read_clique(place at, u32 *offset) {
    u32 next = config_read(at, CAPABILITY_LIST, 1) & 0xfc;
    for (u32 steps = 0; next >= 0x40 && steps < 48; steps++) {
        u32 first = config_read(at, next, 4), second = config_read(at, next + 4, 4);
        if ((first & 0xff) == CAP_VENDOR && first >> 24 == 0x50 && (second & 0xffff) == 0x5032 && (second >> 16 & 7) == 0) {
            *offset = next;
            return (int)(second >> 19 & 15);
        }
        next = first >> 8 & 0xfc;
    }
    return NO_CLIQUE;
}

static bool has_capability_list(place at) { return config_read(at, 6, 2) & 0x10; }

static int clique_of(struct function *function, u32 *offset) {
    return function->header == 0 && has_capability_list(function->at) ? read_clique(function->at, offset) : NO_CLIQUE;
}

static const char *speed_name(u32 code) {
    static const char *const names[] = {"none", "2.5GT/s", "5GT/s", "8GT/s", "16GT/s", "32GT/s", "64GT/s"};
    return code < 7 ? names[code] : "unknown";
}

static const char *type_name(struct function *function) {
    static const char *const names[16] = {
        [0] = "endpoint", [1] = "legacy-endpoint", [4] = "root-port", [5] = "upstream-port", [6] = "downstream-port",
        [7] = "pcie-pci-bridge", [8] = "pci-pcie-bridge", [9] = "integrated-endpoint", [10] = "event-collector"};
    if (function->express_type < 0)
        return function->is_bridge ? "pci-bridge" : function->class_code >> 8 == 0x0600 ? "host-bridge" : "conventional";
    const char *name = names[function->express_type];
    return name ? name : "unknown";
}

/* ---- the tree, on the serial port ---- */

static char pad[256];
static u32 pad_length;

static void push(char c, u32 count) {
    while (count-- && pad_length < sizeof pad - 1)
        pad[pad_length++] = c;
    pad[pad_length] = 0;
}

static void say_endpoint(struct function *function) {
    u32 offset;
    int clique = clique_of(function, &offset);
    say("  %04x:%04x", function->id & 0xffff, function->id >> 16);
    if (clique != NO_CLIQUE)
        say(" clique %d", clique);
    if (function->link_status >> 4 & 0x3f)
        say(" %s x%u", speed_name(function->link_status & 15), function->link_status >> 4 & 0x3f);
}

static void say_children(int parent, u32 segment, u32 bus);

static void say_function(int index) {
    struct function *function = &functions[index];
    u32 start = pad_length;
    say("%02x.%x", device_of(function->at), function_of(function->at));
    push(' ', 4);
    if (!function->is_bridge) {
        say_endpoint(function);
        say("\n");
    } else if (function->secondary == function->subordinate) {
        say("-[%02x]--", function->secondary);
        push(' ', 7);
        say_children(index, function->at >> 16, function->secondary);
    } else {
        say("-[%02x-%02x]--", function->secondary, function->subordinate);
        push(' ', 10);
        say_children(index, function->at >> 16, function->secondary);
    }
    pad_length = start;
    pad[start] = 0;
}

static bool is_child(int index, int parent, u32 segment, u32 bus) {
    place at = functions[index].at;
    return functions[index].parent == parent && at >> 16 == segment && bus_of(at) == bus;
}

static void say_children(int parent, u32 segment, u32 bus) {
    u32 left = 0, count;
    for (u32 i = 0; i < function_count; i++)
        left += is_child((int)i, parent, segment, bus);
    count = left;
    if (!count)
        say("\n");
    for (u32 i = 0; left; i++) {
        if (!is_child((int)i, parent, segment, bus))
            continue;
        if (left < count)
            say("%s", pad);
        left--;
        say(count == 1 ? "--" : left ? "+-" : "\\-");
        push(count > 1 && left ? '|' : ' ', 1);
        push(' ', 1);
        say_function((int)i);
        pad_length -= 2;
        pad[pad_length] = 0;
    }
}

static void say_tree(void) {
    for (u32 i = 0; i < function_count; i++) {
        place at = functions[i].at;
        if (functions[i].parent >= 0 || (i && functions[i - 1].parent < 0 && functions[i - 1].at >> 8 == at >> 8))
            continue;
        bool seen = false;
        for (u32 before = 0; before < i; before++)
            seen |= functions[before].parent < 0 && functions[before].at >> 8 == at >> 8;
        if (seen)
            continue;
        say("-[%04x:%02x]-", at >> 16, bus_of(at));
        push(' ', 11);
        say_children(-1, at >> 16, bus_of(at));
        pad_length = 0;
        pad[0] = 0;
    }
}

/* ---- the facts, on port 0xE9 ---- */

static void report_window(const char *key, struct window window) {
    if (window.base > window.limit)
        report(" %s=none", key);
    else
        report(" %s=%lx-%lx", key, window.base, window.limit);
}

static void report_capabilities(struct function *function) {
    static const struct { u16 id; const char *name; } standard[] = {
        {CAP_POWER, "power"}, {CAP_MSI, "msi"}, {CAP_VENDOR, "vendor"}, {CAP_SUBSYSTEM, "subsystem"},
        {CAP_EXPRESS, "express"}, {CAP_MSIX, "msix"}, {0x03, "vpd"}, {0x13, "af"}},
      extended[] = {{0x01, "aer"}, {0x03, "serial"}, {0x0b, "vendor"}, {0x0d, "acs"}, {0x0e, "ari"}, {0x0f, "ats"},
        {0x10, "sriov"}, {0x15, "rebar"}, {0x18, "ltr"}, {0x19, "secondary"}, {0x1d, "dpc"}, {0x25, "link-feature"},
        {0x26, "16gt"}, {0x27, "margining"}, {0x2a, "32gt"}};
    place at = function->at;
    u32 clique_offset = 0, offset = has_capability_list(at) ? config_read(at, CAPABILITY_LIST, 1) & 0xfc : 0;
    clique_of(function, &clique_offset);
    report("capabilities %s standard=", place_name(at));
    const char *separator = "";
    for (u32 steps = 0; offset >= 0x40 && steps < 48; steps++) {
        u32 head = config_read(at, offset, 2);
        const char *name = offset == clique_offset ? "clique" : NULL;
        for (u32 i = 0; !name && i < sizeof standard / sizeof *standard; i++)
            if (standard[i].id == (head & 0xff))
                name = standard[i].name;
        if (name)
            report("%s%s", separator, name);
        else
            report("%s%02x", separator, head & 0xff);
        separator = ",";
        offset = head >> 8 & 0xfc;
    }
    report("%s extended=", *separator ? "" : "none");
    separator = "";
    offset = function->express_type >= 0 ? 0x100 : 0;
    for (u32 steps = 0; offset >= 0x100 && steps < 960; steps++) {
        u32 head = config_read(at, offset, 4);
        if (head == 0 || head == 0xffffffff)
            break;
        const char *name = NULL;
        for (u32 i = 0; !name && i < sizeof extended / sizeof *extended; i++)
            if (extended[i].id == (head & 0xffff))
                name = extended[i].name;
        if (name)
            report("%s%s", separator, name);
        else
            report("%s%04x", separator, head & 0xffff);
        separator = ",";
        offset = head >> 20 & 0xffc;
    }
    report("%s\n", *separator ? "" : "none");
}

static void report_bars(struct function *function) {
    static const char *const kinds[] = {[BAR_IO] = "io", [BAR_MEM32] = "mem32", [BAR_MEM64] = "mem64"};
    for (u32 n = 0; n < 6; n++) {
        struct bar *bar = &function->bars[n];
        if (bar->kind != BAR_NONE)
            report("bar %s %u type=%s prefetchable=%s base=%lx size=%lx\n", place_name(function->at), n, kinds[bar->kind],
                   bar->prefetchable ? "yes" : "no", bar->base, bar->size);
    }
}

static void report_function(struct function *function) {
    const char *name = place_name(function->at);
    report("function %s id=%04x:%04x subsystem=", name, function->id & 0xffff, function->id >> 16);
    if (function->subsystem)
        report("%04x:%04x", function->subsystem & 0xffff, function->subsystem >> 16);
    else
        report("none");
    report(" class=%06x type=%s multi-function=%s\n", function->class_code, type_name(function),
           function->multi_function ? "yes" : "no");
    if (function->is_bridge) {
        report("bridge %s primary=%02x secondary=%02x subordinate=%02x", name, config_read(function->at, BUSES, 1),
               function->secondary, function->subordinate);
        report_window("io", function->io);
        report_window("memory", function->memory);
        report_window("prefetchable", function->prefetchable);
        report("\n");
    }
    report_bars(function);
    if (function->express_type >= 0)
        report("link %s max=%s,x%u now=%s,x%u\n", name, speed_name(function->link_capability & 15),
               function->link_capability >> 4 & 0x3f, speed_name(function->link_status & 15), function->link_status >> 4 & 0x3f);
    report_capabilities(function);
    u32 msi = msi_vectors(function->at), msix = msix_vectors(function->at);
    if (msi || msix || function->pin) {
        report("interrupts %s msi=%u msix=%u pin=", name, msi, msix);
        if (function->pin)
            report("%c\n", 'A' + function->pin - 1);
        else
            report("none\n");
    }
    u32 offset;
    int clique = clique_of(function, &offset);
    if (clique != NO_CLIQUE)
        report("clique %s id=%d at=%02x\n", name, clique, offset);
}

/* ---- copies between devices ---- */

static u64 pattern(u32 seed, u32 i) { return (seed + 1) * 0x0123456789abcdefull + i * 0x0101010101010101ull; }

/* Engine `from` copies from the middle of its own largest BAR to a page later in the largest BAR of `to`, and raises its
 * last vector. */
static void copy_between(u32 n, struct function *from, struct function *to) {
    int source_bar = largest_bar(from), target_bar = largest_bar(to);
    u32 vectors = msix_vectors(from->at), index = vectors ? vectors - 1 : 0;
    bool message = vectors || msi_vectors(from->at);
    u8 vector = (u8)(FIRST_VECTOR + n % 32);
    u64 source = from->bars[source_bar].base + from->bars[source_bar].size / 2;
    u64 target = to->bars[target_bar].base + to->bars[target_bar].size / 2 + 4096;

    config_write(from->at, COMMAND, 2, config_read(from->at, COMMAND, 2) | DECODE_MEMORY | BUS_MASTER);
    if (vectors) {
        msix_fill(from, index, vector);
        msix_control(from->at, MSIX_ON);
    } else if (message) {
        msi_enable(from->at, vector);
    }
    reach(source, COPY_BYTES);
    reach(target, COPY_BYTES);
    for (u32 i = 0; i < COPY_BYTES / 8; i++)
        write64(source + 8 * i, pattern(n, i));
    u32 before = interrupt_count[vector];
    u32 control = stub_copy(from, source, target, COPY_BYTES, index);
    const char *result = control & STUB_ERROR ? "refused" : control & STUB_DONE ? "ok" : "no-end";
    for (u32 i = 0; i < COPY_BYTES / 8 && control & STUB_DONE; i++)
        if (read64(target + 8 * i) != pattern(n, i))
            result = "wrong-data";
    report("dma %s from=%lx to=%lx bytes=%u peer=%s result=%s\n", place_name(from->at), source, target, COPY_BYTES,
           place_name(to->at), result);
    if (message)
        report("interrupt %s kind=%s vector=%u result=%s\n", place_name(from->at), vectors ? "msix" : "msi", index,
               interrupt_arrives(vector, before) ? "received" : "missing");
    say("%s -> %s: %u bytes from %lx to %lx %s\n", place_name(from->at), place_name(to->at), COPY_BYTES, source, target, result);
}

static void copy_around(void) {
    static struct function *engines[MAX_FUNCTIONS];
    u32 count = 0;
    for (u32 i = 0; i < function_count; i++)
        if (is_stub(&functions[i]) && largest_bar(&functions[i]) >= 0)
            engines[count++] = &functions[i];
    apic_start();
    interrupts_on();
    for (u32 n = 0; count > 1 && n < count; n++)
        copy_between(n, engines[n], engines[(n + 1) % count]);
    interrupts_off();
}

static void report_config_access(void) {
    for (u32 i = 0; i < segment_count; i++)
        report("segment %04x ecam=%lx buses=%02x-%02x\n", segments[i].number, segments[i].ecam, segments[i].first_bus,
               segments[i].last_bus);
    bool agree = true;
    for (u32 i = 0; config_ports && i < function_count; i++)
        if (functions[i].at < 0x10000)
            agree &= config_read_by_ports(functions[i].at, 0, 4) == functions[i].id;
    report("ports answered=%s%s\n", config_ports ? "yes" : "no", !config_ports ? "" : agree ? " agree=yes" : " agree=no");
}

static void report_roots(void) {
    for (u32 i = 0; i < function_count; i++) {
        bool first = functions[i].parent < 0;
        for (u32 before = 0; before < i; before++)
            first &= functions[before].parent >= 0 || functions[before].at >> 8 != functions[i].at >> 8;
        if (!first)
            continue;
        u32 segment = functions[i].at >> 16, bus = bus_of(functions[i].at);
        int node = root_node(segment, bus);
        report("root %04x:%02x node=", segment, bus);
        if (node < 0)
            report("none\n");
        else
            report("%d\n", node);
    }
}

void guest(void) {
    report("banyan-probe 1\n");
    pci_start();
    walk();
    say_tree();
    report_config_access();
    report_roots();
    for (u32 i = 0; i < function_count; i++)
        report_function(&functions[i]);
    copy_around();
    report("end functions=%u\n", function_count);
    power_off();
}
