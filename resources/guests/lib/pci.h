/* Configuration space and the tree of functions that a bus walk finds. Registers: PCIe 6.0 chapter 7. */
#pragma once
#include "cpu.h"

/* A function's place: segment << 16 | bus << 8 | device << 3 | function. */
typedef u32 place;
static inline place place_of(u32 segment, u32 bus, u32 device, u32 function) {
    return segment << 16 | bus << 8 | device << 3 | function;
}
static inline u32 bus_of(place at) { return at >> 8 & 0xff; }
static inline u32 device_of(place at) { return at >> 3 & 0x1f; }
static inline u32 function_of(place at) { return at & 7; }
/* "03:00.0", or "0001:03:00.0" outside segment 0. The text lives until the fourth call after this one. */
const char *place_name(place at);

/* One entry of the MCFG table. */
struct segment { u64 ecam; u16 number; u8 first_bus, last_bus; };
extern struct segment segments[16];
extern u32 segment_count;
/* True when port 0xCF8 holds what is written to it (linux: arch/x86/pci/direct.c tests the same). */
extern bool config_ports;

/* Reads MCFG and tries the ports; fails the guest when neither exists. */
void pci_start(void);

/* Config access of 1, 2 or 4 bytes by ECAM, or by the ports where there is no ECAM. */
u32 config_read(place at, u32 offset, u32 size);
void config_write(place at, u32 offset, u32 size, u32 value);
/* The same by ports 0xCF8 and 0xCFC: segment 0, offsets below 256. */
u32 config_read_by_ports(place at, u32 offset, u32 size);
void config_write_by_ports(place at, u32 offset, u32 size, u32 value);

enum { COMMAND = 0x04, BAR0 = 0x10, BUSES = 0x18, CAPABILITY_LIST = 0x34 };
enum { DECODE_IO = 1, DECODE_MEMORY = 2, BUS_MASTER = 4, INTX_OFF = 0x400 };
enum { CAP_POWER = 0x01, CAP_MSI = 0x05, CAP_VENDOR = 0x09, CAP_SUBSYSTEM = 0x0d, CAP_EXPRESS = 0x10, CAP_MSIX = 0x11 };

/* Offset of a capability, 0 when absent. A list that loops or leaves 0x40..0xFF ends there. */
u32 find_capability(place at, u8 id);
u32 find_extended_capability(place at, u16 id);

enum bar_kind { BAR_NONE, BAR_IO, BAR_MEM32, BAR_MEM64 };
struct bar { u64 base, size; enum bar_kind kind; bool prefetchable; };
/* base > limit: the bridge forwards nothing. Limits are inclusive. */
struct window { u64 base, limit; };

struct function {
    place at;
    u32 id;            /* device << 16 | vendor */
    u32 subsystem;     /* device << 16 | vendor; 0 when there is none */
    u32 class_code;    /* 24 bits: class, subclass, interface */
    u8 header;         /* header type without the multi-function bit */
    bool multi_function, is_bridge;
    int express_type;  /* PCIe capability device/port type, -1 without the capability */
    u32 link_capability;
    u16 link_status;
    u8 pin;            /* interrupt pin, 0 none, 1 = A */
    u8 secondary, subordinate;
    struct window io, memory, prefetchable;
    struct bar bars[6];
    int parent;        /* index of the bridge above, -1 on a root bus */
};

enum { MAX_FUNCTIONS = 1024 };
extern struct function functions[MAX_FUNCTIONS];
extern u32 function_count;
/* Walks every segment, following the bus numbers that are programmed; root buses other than a segment's first one are
 * found by looking at the buses that no bridge leads to. Fills `functions` in walk order. */
void walk(void);
/* Reads BAR n's size by a sizing write with decode off; restores BAR and command register. */
struct bar read_bar(place at, u32 n);
