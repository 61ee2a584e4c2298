/* The I/O interrupt controller (82093AA data sheet): routes a GSI to a vector of this processor. */
#pragma once
#include "cpu.h"

/* Unmasks a pin; level-triggered pins are active low, as PCI's INTx is described in _PRT. */
void ioapic_route(u32 gsi, u8 vector, bool level);
void ioapic_mask(u32 gsi);
u32 ioapic_pins(void);
