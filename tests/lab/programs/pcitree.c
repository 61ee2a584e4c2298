/* Prints the shape of the PCI Express hierarchy: port types and endpoint ids, nested, without any bus number or address.
 *
 *   pcitree                  everything that hangs on a port
 *   pcitree ADDRESS...       only what leads to these functions
 *
 * Two hierarchies have the same shape when the lines between `tree begin` and `tree end` are the same. Functions that sit on
 * a root bus and are no bridge are left out: they are the machine's own. */
#include <dirent.h>
#include <fcntl.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define DEVICES "/sys/bus/pci/devices"
#define MOST 512

struct function {
    char path[512]; /* real path in sysfs: its components are the functions on the way */
    char address[16];
    uint8_t config[256];
};

static struct function functions[MOST];
static int count;

static bool is_bridge(const struct function *f) { return (f->config[0x0e] & 0x7f) == 1; }

/* The device/port type of the PCI Express capability (PCIe 6.0 7.5.3.2), or -1 for a conventional function. */
static int port_type(const struct function *f) {
    if (!(f->config[0x06] & 0x10)) return -1;
    uint8_t at = f->config[0x34] & 0xfc;
    for (int steps = 0; at >= 0x40 && steps < 48; steps++) {
        if (f->config[at] == 0x10) return f->config[at + 2] >> 4;
        at = f->config[at + 1] & 0xfc;
    }
    return -1;
}

static const char *type_name(const struct function *f) {
    switch (port_type(f)) {
    case 0: case 1: return "endpoint";
    case 4: return "root-port";
    case 5: return "upstream-port";
    case 6: return "downstream-port";
    case 7: return "pcie-to-pci-bridge";
    case 9: return "integrated-endpoint";
    default: return is_bridge(f) ? "pci-bridge" : "endpoint";
    }
}

static bool on_root_bus(const struct function *f) {
    const char *parent = strrchr(f->path, '/');
    while (parent > f->path && parent[-1] != '/') parent--;
    return !strncmp(parent, "pci", 3);
}

/* Is `inner` the function `outer`, or anywhere below it? */
static bool is_within(const struct function *inner, const struct function *outer) {
    size_t length = strlen(outer->path);
    return !strncmp(inner->path, outer->path, length) && (inner->path[length] == 0 || inner->path[length] == '/');
}

static void read_functions(void) {
    DIR *folder = opendir(DEVICES);
    struct dirent *entry;
    while (folder && count < MOST && (entry = readdir(folder))) {
        struct function *f = &functions[count];
        char name[300], real[4096];
        if (entry->d_name[0] == '.' || strlen(entry->d_name) >= sizeof f->address) continue;
        snprintf(name, sizeof name, DEVICES "/%s", entry->d_name);
        if (!realpath(name, real) || strlen(real) >= sizeof f->path) continue;
        strcpy(f->path, real);
        strcpy(f->address, entry->d_name);
        strcat(name, "/config");
        int file = open(name, O_RDONLY);
        if (file < 0 || pread(file, f->config, sizeof f->config, 0) < 64) { perror(name); exit(2); }
        close(file);
        count++;
    }
    if (folder) closedir(folder);
}

static int by_path(const void *a, const void *b) { return strcmp(((const struct function *)a)->path, ((const struct function *)b)->path); }

static bool is_wanted(const struct function *f, char **addresses) {
    if (!*addresses) return !on_root_bus(f) || is_bridge(f);
    for (int i = 0; i < count; i++)
        for (char **address = addresses; *address; address++)
            if (!strcmp(functions[i].address, *address) && is_within(&functions[i], f)) return true;
    return false;
}

int main(int argc, char **argv) {
    (void)argc;
    read_functions();
    qsort(functions, count, sizeof *functions, by_path);
    puts("tree begin");
    for (int i = 0; i < count; i++) {
        const struct function *f = &functions[i];
        if (!is_wanted(f, argv + 1)) continue;
        int depth = 0;
        for (int j = 0; j < count; j++) depth += j != i && is_within(f, &functions[j]);
        const uint8_t *c = f->config;
        printf("%*s%s", depth * 2, "", type_name(f));
        if (!is_bridge(f)) printf(" %02x%02x:%02x%02x class %02x%02x%02x", c[1], c[0], c[3], c[2], c[11], c[10], c[9]);
        puts("");
    }
    puts("tree end");
    return 0;
}
