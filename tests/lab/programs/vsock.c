/* Echo over sockets between guest and host, and programs that use it.
 *
 *   vsock serve PORT                        in the guest: echoes what comes to this port
 *   vsock call PORT STREAMS BYTES           in the guest: calls the host's port
 *   vsock serve-unix PATH                   on the host: echoes what the guest sends to the socket PATH (`..._PORT`)
 *   vsock dial PATH PORT STREAMS BYTES      on the host: calls the guest's port through the device's socket
 *   vsock hold PATH COUNT SECONDS [WORDS]   on the host: that many clients that say nothing, or these words and no more
 *
 * Each stream carries its own bytes, ends its half when they are sent, and wants all of them back. All streams of a call are open
 * at the same time. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <time.h>
#include <unistd.h>

enum { MOST = 1200, CHUNK = 16384, HOST_CID = 2, WAIT_MS = 60000 };

struct vm_address { unsigned short family, zero; unsigned port, cid; unsigned char rest[4]; };

struct stream {
    int fd;
    size_t sent, received, held;
    int ended, seed;
    unsigned char buffer[CHUNK];
};

static struct stream streams[MOST];
static struct pollfd polled[MOST + 1];

static int fail(const char *what) { fprintf(stderr, "vsock: %s: %s\n", what, strerror(errno)); return 1; }

static unsigned char byte_of(int seed, size_t at) { return (unsigned char)(at * 31 + at / 251 + (size_t)seed * 7); }

static int unix_socket(const char *path, int listening) {
    struct sockaddr_un at = { .sun_family = AF_UNIX };
    if (strlen(path) >= sizeof at.sun_path) { errno = ENAMETOOLONG; return -1; }
    strcpy(at.sun_path, path);
    int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    if (fd < 0) return -1;
    if (listening) unlink(path);
    if (listening ? bind(fd, (struct sockaddr *)&at, sizeof at) || listen(fd, 1024) : connect(fd, (struct sockaddr *)&at, sizeof at)) {
        close(fd);
        return -1;
    }
    return fd;
}

static int vm_socket(unsigned cid, unsigned port, int listening) {
    struct vm_address at = { .family = AF_VSOCK, .port = port, .cid = cid };
    int fd = socket(AF_VSOCK, SOCK_STREAM | SOCK_CLOEXEC, 0);
    if (fd < 0) return -1;
    if (listening ? bind(fd, (struct sockaddr *)&at, sizeof at) || listen(fd, 1024) : connect(fd, (struct sockaddr *)&at, sizeof at)) {
        close(fd);
        return -1;
    }
    return fd;
}

static void unblock(int fd) { fcntl(fd, F_SETFL, fcntl(fd, F_GETFL) | O_NONBLOCK); }

/* Echoes for ever, once it has said that it does. */
static int serve(int listener) {
    if (listener < 0) return fail("cannot listen");
    unblock(listener);
    puts("serving");
    fflush(stdout);
    size_t count = 0;
    for (;;) {
        for (size_t n = 0; n < count; n++) {
            struct stream *s = &streams[n];
            polled[n] = (struct pollfd){ .fd = s->fd, .events = (short)((s->held ? POLLOUT : 0) | (!s->held && !s->ended ? POLLIN : 0)) };
        }
        polled[count] = (struct pollfd){ .fd = count < MOST ? listener : -1, .events = POLLIN };
        if (poll(polled, count + 1, -1) < 0) return fail("poll");
        int came = polled[count].revents != 0;
        for (size_t n = count; n-- > 0;) {
            struct stream *s = &streams[n];
            int over = 0;
            if (polled[n].revents & (POLLIN | POLLHUP | POLLERR) && !s->held && !s->ended) {
                ssize_t got = read(s->fd, s->buffer, CHUNK);
                if (got > 0) { s->held = (size_t)got; s->sent = 0; }
                else if (got == 0) s->ended = 1;
                else if (errno != EAGAIN) over = 1;
            }
            if (s->held) {
                ssize_t put = write(s->fd, s->buffer + s->sent, s->held);
                if (put > 0) { s->sent += (size_t)put; s->held -= (size_t)put; }
                else if (put < 0 && errno != EAGAIN) over = 1;
            }
            if (over || (s->ended && !s->held)) { close(s->fd); *s = streams[--count]; polled[n] = polled[count]; }
        }
        while (came && count < MOST) {
            int fd = accept(listener, NULL, NULL);
            if (fd < 0) break;
            unblock(fd);
            streams[count++] = (struct stream){ .fd = fd };
        }
    }
}

/* Sends and takes back `bytes` on each of `count` open streams. */
static int exchange(size_t count, size_t bytes) {
    size_t done = 0;
    for (size_t n = 0; n < count; n++) unblock(streams[n].fd);
    while (done < count) {
        for (size_t n = 0; n < count; n++) {
            struct stream *s = &streams[n];
            polled[n] = (struct pollfd){ .fd = s->ended ? -1 : s->fd, .events = (short)(POLLIN | (s->sent < bytes ? POLLOUT : 0)) };
        }
        int ready = poll(polled, count, WAIT_MS);
        if (ready <= 0) { if (!ready) errno = ETIMEDOUT; return fail("waiting for the echo"); }
        for (size_t n = 0; n < count; n++) {
            struct stream *s = &streams[n];
            if (polled[n].revents & POLLOUT && s->sent < bytes) {
                unsigned char part[CHUNK];
                size_t len = bytes - s->sent < CHUNK ? bytes - s->sent : CHUNK;
                for (size_t i = 0; i < len; i++) part[i] = byte_of(s->seed, s->sent + i);
                ssize_t put = write(s->fd, part, len);
                if (put < 0 && errno != EAGAIN) return fail("write");
                if (put > 0) s->sent += (size_t)put;
                if (s->sent == bytes && shutdown(s->fd, SHUT_WR)) return fail("shutdown");
            }
            if (polled[n].revents & (POLLIN | POLLHUP | POLLERR)) {
                ssize_t got = read(s->fd, s->buffer, CHUNK);
                if (got < 0 && errno != EAGAIN) return fail("read");
                for (ssize_t i = 0; i < got; i++)
                    if (s->buffer[i] != byte_of(s->seed, s->received++)) { fprintf(stderr, "vsock: stream %zu has a wrong byte\n", n); return 1; }
                if (got == 0) {
                    if (s->received != bytes) { fprintf(stderr, "vsock: stream %zu ended after %zu bytes\n", n, s->received); return 1; }
                    s->ended = 1;
                    done++;
                }
            }
        }
    }
    printf("%zu streams echoed %zu bytes each\n", count, bytes);
    return 0;
}

/* Reads the answer to CONNECT byte by byte. */
static int confirmed(int fd) {
    char line[32];
    for (size_t n = 0; n < sizeof line - 1; n++) {
        if (read(fd, line + n, 1) != 1) return 0;
        if (line[n] == '\n') return !strncmp(line, "OK ", 3);
    }
    return 0;
}

static int dial(const char *path, const char *port, size_t count, size_t bytes) {
    for (size_t n = 0; n < count; n++) {
        char line[32];
        int fd = unix_socket(path, 0);
        if (fd < 0) return fail(path);
        int len = snprintf(line, sizeof line, "%s %s\n", n % 2 ? "connect" : "CONNECT", port);
        if (write(fd, line, (size_t)len) != len) return fail("write");
        streams[n] = (struct stream){ .fd = fd, .seed = (int)n };
    }
    for (size_t n = 0; n < count; n++)
        if (!confirmed(streams[n].fd)) { fprintf(stderr, "vsock: stream %zu is turned away\n", n); return 3; }
    return exchange(count, bytes);
}

static int call(unsigned port, size_t count, size_t bytes) {
    for (size_t n = 0; n < count; n++) {
        int fd = vm_socket(HOST_CID, port, 0);
        if (fd < 0) { fail("cannot connect"); return 3; }
        streams[n] = (struct stream){ .fd = fd, .seed = (int)n };
    }
    return exchange(count, bytes);
}

static int hold(const char *path, size_t count, unsigned seconds, const char *words) {
    for (size_t n = 0; n < count; n++) {
        int fd = unix_socket(path, 0);
        if (fd < 0) return fail(path);
        if (write(fd, words, strlen(words)) != (ssize_t)strlen(words)) return fail("write");
    }
    printf("%zu clients say nothing more\n", count);
    fflush(stdout);
    sleep(seconds);
    return 0;
}

int main(int argc, char **argv) {
    struct rlimit files = { 4096, 4096 };
    setrlimit(RLIMIT_NOFILE, &files);
    if (argc == 3 && !strcmp(argv[1], "serve")) return serve(vm_socket(~0u, (unsigned)atol(argv[2]), 1));
    if (argc == 3 && !strcmp(argv[1], "serve-unix")) return serve(unix_socket(argv[2], 1));
    if (argc == 5 && !strcmp(argv[1], "call") && atol(argv[3]) <= MOST) return call((unsigned)atol(argv[2]), (size_t)atol(argv[3]), (size_t)atol(argv[4]));
    if (argc == 6 && !strcmp(argv[1], "dial") && atol(argv[4]) <= MOST) return dial(argv[2], argv[3], (size_t)atol(argv[4]), (size_t)atol(argv[5]));
    if ((argc == 5 || argc == 6) && !strcmp(argv[1], "hold"))
        return hold(argv[2], (size_t)atol(argv[3]), (unsigned)atol(argv[4]), argc == 6 ? argv[5] : "");
    fprintf(stderr, "usage: see the head of vsock.c\n");
    return 2;
}
