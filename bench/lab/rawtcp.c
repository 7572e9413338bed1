// What plain TCP sockets do between two processes: ping-pong and streams, the bars for a transport over sockets.
//
//   rawtcp serve PORT                                      answers one caller after the other
//   rawtcp pingpong ADDRESS PORT BYTES COUNT block|spin     half a round trip of BYTES each way
//   rawtcp exchange ADDRESS PORT BYTES COUNT block|spin     both send BYTES at once, then both have received them
//   rawtcp stream   ADDRESS PORT BYTES STREAMS SECONDS      one way, over STREAMS connections, a thread each
//
// block: blocking sockets; spin: non-blocking ones that are tried again at once. PIN=CORE keeps a process on a core.
// Prints "us MEAN median MEDIAN" (of the counted ones, after a tenth as many to warm up) or "gbit RATE".
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <linux/tcp.h>
#include <netinet/in.h>
#include <pthread.h>
#include <sched.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

enum { PINGPONG = 1, EXCHANGE, STREAM };
typedef struct { uint32_t what, spin; uint64_t bytes, count; } Ask;

static double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec + t.tv_nsec * 1e-9;
}

static void die(const char *what) {
    perror(what);
    exit(1);
}

static int again(void) { return errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR; }

static void put(int fd, const char *p, size_t n) {
    for (ssize_t k; n; p += k, n -= k)
        if ((k = write(fd, p, n)) < 0) {
            if (!again()) die("write");
            k = 0;
        }
}

static void get(int fd, char *p, size_t n) {
    for (ssize_t k; n; p += k, n -= k) {
        if ((k = read(fd, p, n)) == 0) exit(1);
        if (k < 0) {
            if (!again()) die("read");
            k = 0;
        }
    }
}

// Both directions, whichever is ready: two blocking writes could wait for each other.
static void swap(int fd, const char *out, char *in, size_t n) {
    size_t sent = 0, got = 0;
    while (sent < n || got < n) {
        ssize_t k;
        if (sent < n) {
            if ((k = send(fd, out + sent, n - sent, MSG_DONTWAIT)) > 0) sent += k;
            else if (k < 0 && !again()) die("send");
        }
        if (got < n) {
            if ((k = recv(fd, in + got, n - got, sent < n ? MSG_DONTWAIT : 0)) > 0) got += k;
            else if (k == 0) exit(1);
            else if (!again()) die("recv");
        }
    }
}

static void mode(int fd, int spin) {
    int flags = fcntl(fd, F_GETFL), one = 1;
    fcntl(fd, F_SETFL, spin ? flags | O_NONBLOCK : flags & ~O_NONBLOCK);
    setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
}

static void *answer(void *arg) {
    int fd = (int)(intptr_t)arg;
    Ask ask;
    mode(fd, 0);
    get(fd, (char *)&ask, sizeof ask);
    char *in = calloc(1, ask.bytes), *out = calloc(1, ask.bytes);
    mode(fd, ask.spin);
    if (ask.what == STREAM)
        for (ssize_t k; (k = read(fd, in, ask.bytes)) > 0;) (void)k;
    else
        for (uint64_t i = 0; i < ask.count; i++)
            if (ask.what == EXCHANGE) swap(fd, out, in, ask.bytes);
            else get(fd, in, ask.bytes), put(fd, out, ask.bytes);
    mode(fd, 0);
    char end;
    while (read(fd, &end, 1) > 0) {}
    close(fd);
    free(in), free(out);
    return NULL;
}

static void serve(int port) {
    struct sockaddr_in a = {.sin_family = AF_INET, .sin_port = htons(port)};
    int ls = socket(AF_INET, SOCK_STREAM, 0), one = 1;
    setsockopt(ls, SOL_SOCKET, SO_REUSEADDR, &one, sizeof one);
    if (bind(ls, (struct sockaddr *)&a, sizeof a) || listen(ls, 64)) die("listen");
    for (;;) {
        int fd = accept(ls, NULL, NULL);
        pthread_t t;
        if (fd < 0 || pthread_create(&t, NULL, answer, (void *)(intptr_t)fd)) die("accept");
        pthread_detach(t);
    }
}

static int call(char **v, Ask ask) {
    struct sockaddr_in a = {.sin_family = AF_INET, .sin_port = htons(atoi(v[3]))};
    inet_pton(AF_INET, v[2], &a.sin_addr);
    for (int tries = 0; tries < 500; tries++) {
        int fd = socket(AF_INET, SOCK_STREAM, 0);
        if (!connect(fd, (struct sockaddr *)&a, sizeof a)) {
            mode(fd, 0);
            put(fd, (char *)&ask, sizeof ask);
            mode(fd, ask.spin);
            return fd;
        }
        close(fd);
        usleep(10000);
    }
    die("connect");
    return -1;
}

static double until;
static size_t piece;

static void *pour(void *arg) {
    char *out = calloc(1, piece);
    while (now() < until)
        if (write((int)(intptr_t)arg, out, piece) < 0) break;
    free(out);
    return NULL;
}

static int by_value(const void *a, const void *b) { return (*(double *)a > *(double *)b) - (*(double *)a < *(double *)b); }

int main(int c, char **v) {
    if (getenv("PIN")) {
        cpu_set_t set;
        CPU_ZERO(&set);
        CPU_SET(atoi(getenv("PIN")), &set);
        sched_setaffinity(0, sizeof set, &set);
    }
    if (c == 3 && !strcmp(v[1], "serve")) serve(atoi(v[2]));
    if (c != 7) return fprintf(stderr, "usage: see the head of rawtcp.c\n"), 2;
    size_t bytes = strtoull(v[4], 0, 10), count = strtoull(v[5], 0, 10);
    if (!strcmp(v[1], "stream")) {
        pthread_t t[64];
        int fd[64], streams = count > 64 ? 64 : count;
        piece = bytes;
        for (int i = 0; i < streams; i++) fd[i] = call(v, (Ask){STREAM, 0, bytes, 0});
        double begun = now(), total = 0;
        until = begun + atof(v[6]);
        for (int i = 0; i < streams; i++) pthread_create(&t[i], NULL, pour, (void *)(intptr_t)fd[i]);
        for (int i = 0; i < streams; i++) pthread_join(t[i], NULL);
        double spent = now() - begun;
        for (int i = 0; i < streams; i++) {
            struct tcp_info info = {0};
            socklen_t size = sizeof info;
            if (getsockopt(fd[i], IPPROTO_TCP, TCP_INFO, &info, &size)) die("tcp_info");
            total += info.tcpi_bytes_acked;
        }
        printf("gbit %.3f\n", total * 8 / spent / 1e9);
        return 0;
    }
    int both = !strcmp(v[1], "exchange"), spin = !strcmp(v[6], "spin");
    size_t warm = count / 10 + 1;
    int fd = call(v, (Ask){both ? EXCHANGE : PINGPONG, spin, bytes, warm + count});
    char *in = calloc(1, bytes), *out = calloc(1, bytes);
    double *took = calloc(count, sizeof *took);
    for (size_t i = 0; i < warm + count; i++) {
        double begun = now();
        if (both) swap(fd, out, in, bytes);
        else put(fd, out, bytes), get(fd, in, bytes);
        if (i >= warm) took[i - warm] = (now() - begun) / (both ? 1 : 2);
    }
    double sum = 0;
    for (size_t i = 0; i < count; i++) sum += took[i];
    qsort(took, count, sizeof *took, by_value);
    printf("us %.2f median %.2f\n", sum / count * 1e6, took[count / 2] * 1e6);
    return 0;
}
