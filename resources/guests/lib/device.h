/* What a guest does with one device: interrupts and Banyan's stub endpoint. */
#pragma once
#include "pci.h"

/* Message interrupts to this processor (PCIe 6.0, 7.7.1 and 7.7.2). Vectors are vectors of the processor. */
u32 msi_vectors(place at);  /* 0 without the capability */
u32 msix_vectors(place at); /* 0 without the capability */
void msi_enable(place at, u8 vector);
void msi_disable(place at);
/* Address of a table entry; its words: address low, address high, data, control (bit 0: masked). */
u64 msix_entry(struct function *function, u32 index);
bool msix_pending(struct function *function, u32 index);
/* Fills an entry and leaves it unmasked; msix_control then switches the capability on. */
void msix_fill(struct function *function, u32 index, u8 vector);
enum { MSIX_ON = 0x8000, MSIX_MASK_ALL = 0x4000 };
void msix_control(place at, u16 bits);

/* Register page at the start of a stub's BAR 0. */
enum stub_register {
    STUB_MAGIC = 0x00,       /* 0x4E594E42 */
    STUB_VERSION = 0x04,     /* 1 */
    STUB_SCRATCH = 0x08,
    STUB_DOORBELL = 0x0c,    /* write: raises this interrupt vector of the device */
    STUB_DMA_COUNT = 0x10,
    STUB_DOORBELL_COUNT = 0x14,
    STUB_SOURCE = 0x20,      /* 64 bits */
    STUB_DESTINATION = 0x28, /* 64 bits */
    STUB_LENGTH = 0x30,      /* bytes, at most 1 MiB */
    STUB_VECTOR = 0x34,      /* interrupt vector of the device raised at the end */
    STUB_CONTROL = 0x38,     /* write 1: start; read: the bits below */
};
enum { STUB_MAGIC_VALUE = 0x4e594e42, STUB_BUSY = 1, STUB_DONE = 2, STUB_ERROR = 4 };

/* True for an endpoint with a register page, its memory decode on. The page is then reachable. */
bool is_stub(struct function *function);
/* The n-th such endpoint in walk order, or NULL. */
struct function *stub(u32 n);
static inline u64 stub_address(struct function *function, enum stub_register which) {
    return function->bars[0].base + which;
}
/* Starts a copy and waits for its end, about a second at most; returns the control register then. */
u32 stub_copy(struct function *function, u64 from, u64 to, u32 bytes, u32 vector);
/* The memory BAR with the greatest size (the lowest such index), -1 without one of at least 16 KiB. */
int largest_bar(struct function *function);
