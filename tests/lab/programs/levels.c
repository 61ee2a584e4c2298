/* Prints how near the given functions are to each other, and what the kernel shows of them and of the ports above.
 *
 *   levels ADDRESS...                    by their paths in sysfs, two components a step, as NCCL walks
 *   levels --lstopo ADDRESS... < TEXT    by what `lstopo --of console --whole-io --no-collapse` printed
 *
 * Functions are called by their place in the list, so that two machines that have the same ones print the same. */
#include <limits.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define DEVICES "/sys/bus/pci/devices"
enum { MOST = 32, DEEP = 64 };

/* ---- sysfs ---- */

struct walk {
    char parts[DEEP][32]; /* components of the real path from the root complex down to the function */
    int count;
    char node[16]; /* of the function at which the walk ends */
    int switches[DEEP]; /* places in `parts`, the nearest first */
    int switch_count;
};

static void attribute(const char *at, const char *name, char *value, size_t size) {
    char path[256];
    snprintf(path, sizeof path, DEVICES "/%s/%s", at, name);
    FILE *file = fopen(path, "r");
    if (!file || !fgets(value, (int)size, file)) snprintf(value, size, "-");
    value[strcspn(value, "\n")] = 0;
    if (file) fclose(file);
}

static bool is_function(const char *part) { return strlen(part) >= 12 && part[4] == ':' && strchr(part, '.'); }

static void take_walk(const char *at, struct walk *walk) {
    char link[256], path[PATH_MAX];
    snprintf(link, sizeof link, DEVICES "/%s", at);
    if (!realpath(link, path)) {
        fprintf(stderr, "there is no %s\n", at);
        exit(1);
    }
    for (char *part = strtok(strstr(path, "/pci"), "/"); part && walk->count < DEEP; part = strtok(NULL, "/"))
        snprintf(walk->parts[walk->count++], sizeof *walk->parts, "%s", part);
    int last = walk->count - 1;
    while (last >= 2 && is_function(walk->parts[last - 1]) && is_function(walk->parts[last - 2])) {
        last -= 2;
        walk->switches[walk->switch_count++] = last;
    }
    attribute(walk->parts[last], "numa_node", walk->node, sizeof walk->node);
}

static const char *level_of_walks(struct walk *a, struct walk *b) {
    if (!strncmp(a->parts[a->count - 1], b->parts[b->count - 1], 10)) return "PIX";
    for (int i = 0; i < a->switch_count; i++)
        for (int j = 0; j < b->switch_count; j++)
            if (!strcmp(a->parts[a->switches[i]], b->parts[b->switches[j]])) return i || j ? "PXB" : "PIX";
    if (strcmp(a->node, b->node)) return "SYS";
    return strcmp(a->parts[0], b->parts[0]) ? "NODE" : "PHB";
}

enum { IDS = 1, LINK = 2 };

/* What the kernel shows of function `at`. */
static void say_facts(int index, const char *what, const char *at, int shown) {
    static const char *const names[] = {"max_link_speed", "max_link_width", "current_link_speed", "current_link_width",
        "numa_node", "local_cpulist", "class", "vendor", "device", "subsystem_vendor", "subsystem_device"};
    printf("%d %s", index, what);
    for (int i = shown & LINK ? 0 : 4; i < (shown & IDS ? 11 : 7); i++) {
        char value[64];
        attribute(at, names[i], value, sizeof value);
        printf(" %s=%s", names[i], value);
    }
    printf("\n");
}

static void by_sysfs(int count, char **addresses) {
    static struct walk walks[MOST];
    for (int i = 0; i < count; i++) {
        struct walk *walk = &walks[i];
        take_walk(addresses[i], walk);
        say_facts(i, "device", addresses[i], IDS | LINK);
        /* A root port's ids are its machine's own. Downstream ports of QEMU tell no width of their links. */
        for (int part = walk->count - 2; part >= 1; part--)
            say_facts(i, "port", walk->parts[part], part == 1 ? LINK : part % 2 ? IDS : IDS | LINK);
    }
    for (int i = 0; i < count; i++)
        for (int j = i + 1; j < count; j++) printf("%d %d %s\n", i, j, level_of_walks(&walks[i], &walks[j]));
}

/* ---- lstopo ---- */

struct object {
    int line;
    char type[16];
};

struct place {
    struct object above[DEEP]; /* from the machine down to the object above the function */
    int count;
};

static const char *level_of_places(struct place *a, struct place *b) {
    int common = 0;
    while (common < a->count && common < b->count && a->above[common].line == b->above[common].line) common++;
    if (!common) return "?";
    const char *type = a->above[common - 1].type;
    int below_a = a->count - common, below_b = b->count - common;
    if (!strcmp(type, "PCIBridge")) return below_a <= 1 && below_b <= 1 ? "PIX" : "PXB";
    if (!strcmp(type, "HostBridge")) return "PHB";
    /* Two host bridges: near to the same object, or not. */
    bool same = below_a && below_b && !strcmp(a->above[common].type, "HostBridge") && !strcmp(b->above[common].type, "HostBridge");
    return same ? "NODE" : "SYS";
}

static void by_lstopo(int count, char **addresses) {
    static struct place places[MOST];
    struct object stack[DEEP];
    char line[512];
    for (int number = 1; fgets(line, sizeof line, stdin); number++) {
        int depth = (int)strspn(line, " ") / 2;
        char type[16] = "", at[32] = "";
        if (depth >= DEEP || sscanf(line, " %15s %31s", type, at) < 1) continue;
        for (int i = 0; i < count && !strcmp(type, "PCI"); i++) {
            /* Segment 0 goes without saying. */
            if (strcmp(at, addresses[i]) && strcmp(at, addresses[i] + 5)) continue;
            places[i].count = depth;
            memcpy(places[i].above, stack, (size_t)depth * sizeof *stack);
        }
        stack[depth].line = number;
        snprintf(stack[depth].type, sizeof stack[depth].type, "%s", type);
    }
    for (int i = 0; i < count; i++)
        for (int j = i + 1; j < count; j++) printf("%d %d %s\n", i, j, level_of_places(&places[i], &places[j]));
}

int main(int argc, char **argv) {
    bool lstopo = argc > 1 && !strcmp(argv[1], "--lstopo");
    int first = lstopo ? 2 : 1;
    if (argc <= first || argc - first > MOST) {
        fprintf(stderr, "usage: levels [--lstopo] ADDRESS...\n");
        return 2;
    }
    (lstopo ? by_lstopo : by_sysfs)(argc - first, argv + first);
    return 0;
}
