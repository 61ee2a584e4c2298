/* Waits until a file that grows contains a text.
 *
 *   await FILE TEXT SECONDS
 *
 * It ends with 0 as soon as the text is there, and with 1 when time is up. It looks every 5 ms, so that what is waited for can be
 * timed by those who call it. */
#define _GNU_SOURCE
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

enum { CHUNK = 65536, PAUSE_US = 5000 };

static double now(void) {
    struct timespec at;
    clock_gettime(CLOCK_MONOTONIC, &at);
    return at.tv_sec + at.tv_nsec / 1e9;
}

int main(int argc, char **argv) {
    if (argc != 4) { fprintf(stderr, "usage: await FILE TEXT SECONDS\n"); return 2; }
    const char *text = argv[2];
    size_t wanted = strlen(text), held = 0;
    double end = now() + atof(argv[3]);
    static char buffer[CHUNK * 2];
    FILE *file = NULL;
    if (wanted == 0 || wanted >= CHUNK) { fprintf(stderr, "await: the text must have 1 to %d bytes\n", CHUNK - 1); return 2; }
    while (now() < end) {
        if (file == NULL) file = fopen(argv[1], "r");
        size_t got = file == NULL ? 0 : fread(buffer + held, 1, CHUNK, file);
        if (got == 0) {
            if (file != NULL) clearerr(file);
            usleep(PAUSE_US);
            continue;
        }
        held += got;
        if (memmem(buffer, held, text, wanted) != NULL) return 0;
        /* Keeps what may be the beginning of the text. */
        size_t kept = held < wanted - 1 ? held : wanted - 1;
        memmove(buffer, buffer + held - kept, kept);
        held = kept;
    }
    return 1;
}
