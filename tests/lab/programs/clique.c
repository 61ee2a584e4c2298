/* Prints the NVIDIA peer-to-peer clique of each PCI function that has one, read as NVIDIA's open driver reads it.
 *
 *   clique
 *
 * The driver walks the list from 0x34 and takes the first vendor-specific capability (id 09h) with the signature `P2P` at +3 and
 * version 0 in bits 2:0 at +6; the clique is in bits 6:3 there (NVIDIA open-gpu-kernel-modules: `chipset_pcie.c`). */
#include <dirent.h>
#include <fcntl.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#define DEVICES "/sys/bus/pci/devices"

static void show(const char *address) {
    uint8_t c[256];
    char path[300];
    snprintf(path, sizeof path, DEVICES "/%s/config", address);
    int file = open(path, O_RDONLY);
    if (file < 0 || pread(file, c, sizeof c, 0) != sizeof c) {
        perror(path);
        if (file >= 0) close(file);
        return;
    }
    close(file);
    int at = c[0x34] & 0xfc;
    for (int steps = 0; at >= 0x40 && at <= 0xf8 && steps < 48; steps++, at = c[at + 1] & 0xfc) {
        if (c[at] != 0x09 || memcmp(c + at + 3, "P2P", 3) || c[at + 6] & 0x87) continue;
        printf("%02x%02x:%02x%02x has clique %d at 0x%x\n", c[1], c[0], c[3], c[2], c[at + 6] >> 3, at);
        return;
    }
}

int main(void) {
    DIR *folder = opendir(DEVICES);
    struct dirent *entry;
    if (!folder) { perror(DEVICES); return 2; }
    while ((entry = readdir(folder)))
        if (entry->d_name[0] != '.') show(entry->d_name);
    closedir(folder);
    return 0;
}
