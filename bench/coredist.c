// coredist: how far two cores are from each other, by a ping-pong on one cache line.
//
//   coredist [-c A,B] [-t SECONDS] [-m MAX_NS]
//
// Prints the median, 90th percentile and maximum of the round trip over windows of 1,000 rounds, and
// exits 1 when the 90th percentile is above MAX_NS (200): on a virtual machine the two cores can drift
// apart for seconds (the hypervisor moves them between cache complexes), and whatever is staged
// through shared memory then costs a multiple. A measurement taken meanwhile says nothing.
#define _GNU_SOURCE
#include <errno.h>
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

enum { ROUNDS = 1000, MAX_WINDOWS = 100000, LINE = 128 };

static _Alignas(LINE) atomic_int ball; // even: the first core's turn; odd: the second's; -1: the end
static _Alignas(LINE) int cores[2] = {0, 1};

static void pin(int core) {
    cpu_set_t set;
    CPU_ZERO(&set);
    CPU_SET(core, &set);
    int error = pthread_setaffinity_np(pthread_self(), sizeof set, &set);
    if (error) {
        fprintf(stderr, "coredist: core %d: %s\n", core, strerror(error));
        exit(2);
    }
}

static int64_t now_ns(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * 1000000000LL + t.tv_nsec;
}

static void *echo(void *unused) {
    (void)unused;
    pin(cores[1]);
    for (;;) {
        int v = atomic_load_explicit(&ball, memory_order_acquire);
        if (v < 0) return NULL;
        if (v & 1) atomic_store_explicit(&ball, 0, memory_order_release);
    }
}

static int by_value(const void *a, const void *b) {
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

int main(int argc, char **argv) {
    double seconds = 1, limit = 200;
    for (int c; (c = getopt(argc, argv, "c:t:m:")) != -1;) {
        if (c == 'c' && sscanf(optarg, "%d,%d", &cores[0], &cores[1]) == 2) continue;
        if (c == 't' && (seconds = atof(optarg)) > 0) continue;
        if (c == 'm' && (limit = atof(optarg)) > 0) continue;
        fprintf(stderr, "usage: coredist [-c A,B] [-t SECONDS] [-m MAX_NS]\n");
        return 2;
    }
    static double windows[MAX_WINDOWS];
    pthread_t peer;
    pin(cores[0]);
    if ((errno = pthread_create(&peer, NULL, echo, NULL))) {
        perror("coredist: pthread_create");
        return 2;
    }
    int n = 0;
    int64_t end = now_ns() + (int64_t)(seconds * 1e9);
    for (int warm = 1; n < MAX_WINDOWS && now_ns() < end; warm = 0) {
        int64_t t = now_ns();
        for (int i = 0; i < ROUNDS; i++) {
            atomic_store_explicit(&ball, 1, memory_order_release);
            while (atomic_load_explicit(&ball, memory_order_acquire) != 0) {}
        }
        if (!warm) windows[n++] = (double)(now_ns() - t) / ROUNDS;
    }
    atomic_store(&ball, -1);
    pthread_join(peer, NULL);
    if (!n) {
        fprintf(stderr, "coredist: no whole window in %.1f s\n", seconds);
        return 2;
    }
    qsort(windows, n, sizeof *windows, by_value);
    double p90 = windows[(int)(n * 0.9)];
    printf("cores %d,%d round trip: median %.0f ns, p90 %.0f ns, max %.0f ns (%d windows)%s\n", cores[0], cores[1],
           windows[n / 2], p90, windows[n - 1], n, p90 > limit ? ": far apart" : "");
    return p90 > limit;
}
