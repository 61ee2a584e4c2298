/* Finds every function by itself: which buses exist is what the bridges' bus number registers say. */
#include "pci.h"
#include "runtime.h"

__attribute__((section(".scratch,\"aw\",@nobits#"))) struct function functions[MAX_FUNCTIONS];
u32 function_count;

/* Buses of the segment being walked that some bridge leads to, or that have been walked. */
static u8 covered[256];

struct bar read_bar(place at, u32 n) {
    u32 offset = BAR0 + 4 * n;
    struct bar bar = {0, 0, BAR_NONE, false};
    u32 command = config_read(at, COMMAND, 2);
    config_write(at, COMMAND, 2, command & ~(u32)(DECODE_IO | DECODE_MEMORY));
    u32 low = config_read(at, offset, 4);
    config_write(at, offset, 4, 0xffffffff);
    u32 mask = config_read(at, offset, 4);
    config_write(at, offset, 4, low);
    if (mask & 1) {
        bar = (struct bar){low & ~3u, (~(mask & ~3u) + 1) & 0xffff, BAR_IO, false};
    } else if (mask) {
        u64 base = low & ~15u, wide = 0xffffffff00000000 | (mask & ~15u);
        bar.kind = (mask & 6) == 4 ? BAR_MEM64 : BAR_MEM32;
        bar.prefetchable = mask & 8;
        if (bar.kind == BAR_MEM64) {
            u32 high = config_read(at, offset + 4, 4);
            config_write(at, offset + 4, 4, 0xffffffff);
            wide = (u64)config_read(at, offset + 4, 4) << 32 | (mask & ~15u);
            config_write(at, offset + 4, 4, high);
            base |= (u64)high << 32;
        }
        bar.base = base;
        bar.size = ~wide + 1;
    }
    config_write(at, COMMAND, 2, command);
    return bar;
}

static void read_bridge(struct function *function) {
    place at = function->at;
    u32 buses = config_read(at, BUSES, 4);
    function->secondary = buses >> 8 & 0xff;
    function->subordinate = buses >> 16 & 0xff;
    u32 io = config_read(at, 0x1c, 2), memory = config_read(at, 0x20, 4), prefetchable = config_read(at, 0x24, 4);
    function->io = (struct window){(io & 0xf0) << 8, (io & 0xf000) | 0xfff};
    if ((io & 0xf) == 1) {
        u32 upper = config_read(at, 0x30, 4);
        function->io.base |= (u64)(upper & 0xffff) << 16;
        function->io.limit |= upper & 0xffff0000;
    }
    /* An I/O base and limit of zero cannot be told from a window at 0; a bridge whose limit stays zero has none. */
    if (io == 0)
        function->io = (struct window){1, 0};
    function->memory = (struct window){(u64)(memory & 0xfff0) << 16, (memory & 0xfff00000) | 0xfffff};
    function->prefetchable = (struct window){(u64)(prefetchable & 0xfff0) << 16, (prefetchable & 0xfff00000) | 0xfffff};
    if ((prefetchable & 0xf) == 1) {
        function->prefetchable.base |= (u64)config_read(at, 0x28, 4) << 32;
        function->prefetchable.limit |= (u64)config_read(at, 0x2c, 4) << 32;
    }
}

static void read_function(struct function *function, place at, u32 id, int parent) {
    __builtin_memset(function, 0, sizeof *function);
    u32 header = config_read(at, 0x0e, 1);
    function->at = at;
    function->id = id;
    function->parent = parent;
    function->class_code = config_read(at, 8, 4) >> 8;
    function->header = header & 0x7f;
    function->multi_function = header & 0x80;
    function->is_bridge = function->header == 1;
    function->pin = (u8)config_read(at, 0x3d, 1);
    u32 express = find_capability(at, CAP_EXPRESS);
    function->express_type = express ? (int)(config_read(at, express + 2, 2) >> 4 & 15) : -1;
    if (express) {
        function->link_capability = config_read(at, express + 0x0c, 4);
        function->link_status = (u16)config_read(at, express + 0x12, 2);
    }
    if (function->is_bridge) {
        u32 subsystem = find_capability(at, CAP_SUBSYSTEM);
        function->subsystem = subsystem ? config_read(at, subsystem + 4, 4) : 0;
        read_bridge(function);
    } else if (function->header == 0) {
        function->subsystem = config_read(at, 0x2c, 4);
    }
    u32 bars = function->header == 0 ? 6 : function->header == 1 ? 2 : 0;
    for (u32 n = 0; n < bars; n++) {
        function->bars[n] = read_bar(at, n);
        if (function->bars[n].kind == BAR_MEM64)
            n++;
    }
}

static void walk_bus(u32 segment, u32 bus, u32 last_bus, int parent) {
    covered[bus] = 1;
    for (u32 device = 0; device < 32; device++) {
        bool multi_function = false;
        for (u32 number = 0; number < 8; number++) {
            place at = place_of(segment, bus, device, number);
            u32 id = config_read(at, 0, 4);
            if ((id & 0xffff) == 0xffff || id == 0) {
                if (number == 0)
                    break;
                continue;
            }
            require(function_count < MAX_FUNCTIONS, "more than %d functions", MAX_FUNCTIONS);
            int index = (int)function_count++;
            struct function *function = &functions[index];
            read_function(function, at, id, parent);
            if (number == 0)
                multi_function = function->multi_function;
            if (function->is_bridge && function->secondary > bus && function->secondary <= last_bus) {
                for (u32 below = function->secondary; below <= function->subordinate && below < 256; below++)
                    covered[below] = 1;
                walk_bus(segment, function->secondary, last_bus, index);
            }
            if (!multi_function)
                break;
        }
    }
}

void walk(void) {
    for (u32 i = 0; i < segment_count; i++) {
        struct segment *segment = &segments[i];
        __builtin_memset(covered, 0, sizeof covered);
        for (u32 bus = segment->first_bus; bus <= segment->last_bus; bus++)
            if (!covered[bus])
                walk_bus(segment->number, bus, segment->last_bus, -1);
    }
}
