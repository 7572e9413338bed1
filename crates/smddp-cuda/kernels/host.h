/* Host versions of the device functions that reduce.cu uses. The threads of a grid run one after the other. A device may
 * use this order too, because no thread waits for another or reads another thread's results. */

#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define DEVICE static inline
#define ENTRY(name) void name(const struct Args args)

static struct {
    u32 x;
} gridDim, blockIdx, threadIdx;

/* The current launch, and the bytes of each of its arrays. */
static const struct Args *running;
static u64 extent;

/* Aborts on accesses that a device reports as an error or does not detect. */
DEVICE void inside(u64 array, u64 at, u64 size, const char *what) {
    if (at % size || at < array || at + size > array + extent) {
        fprintf(stderr, "%s of %llu bytes at %lld of %llu\n", what, size, (i64)(at - array), extent);
        abort();
    }
}

/* In a grid of copies, sources and destinations alternate, and there is no other destination. */
DEVICE u32 arrays(void) {
    return running->to ? running->n : 2 * running->n;
}

DEVICE void readable(u64 from, u64 size) {
    /* Usually the source of the previous load. */
    static u32 source;
    for (u32 tries = 0; tries < arrays(); tries++) {
        source = source < arrays() ? source : 0;
        if (from - running->sources[source] < extent)
            break;
        source++;
    }
    source = source < arrays() ? source : 0;
    inside(running->sources[source], from, size, "a read");
}

DEVICE void writable(u64 to, u64 size) {
    u64 array = running->to;
    for (u32 copy = 0; copy < running->n && !array; copy++)
        array = to - running->sources[2 * copy + 1] < extent ? running->sources[2 * copy + 1] : 0;
    inside(array, to, size, "a write");
}

#define ACCESS(type, wide, load, store)                  \
    DEVICE wide load(u64 from) {                         \
        type bits;                                       \
        readable(from, sizeof bits);                     \
        memcpy(&bits, (void *)from, sizeof bits);        \
        return bits;                                     \
    }                                                    \
    DEVICE void store(u64 to, wide value) {              \
        type bits = (type)value;                         \
        writable(to, sizeof bits);                       \
        memcpy((void *)to, &bits, sizeof bits);          \
    }

ACCESS(uint8_t, u32, load_8, store_8)
ACCESS(uint16_t, u32, load_16, store_16)
ACCESS(u32, u32, load_32, store_32)
ACCESS(u64, u64, load_64, store_64)

DEVICE struct Pack load_pack(u64 from) {
    struct Pack pack;
    readable(from, sizeof pack);
    memcpy(&pack, (void *)from, sizeof pack);
    return pack;
}

DEVICE void store_pack(u64 to, struct Pack pack) {
    writable(to, sizeof pack);
    memcpy((void *)to, &pack, sizeof pack);
}

DEVICE float widen_f16(u32 bits) {
    u32 sign = (bits & 0x8000u) << 16, rest = (bits & 0x7fffu) << 13;
    /* 2^112: the difference between the exponent biases. The product is exact, also for subnormals. */
    const float rebias = 5192296858534827628530496329220096.0f;
    float wide;
    if (rest >= 0x7c00u << 13) {
        rest |= 0x7f800000u | (rest > 0x7c00u << 13 ? 0x00400000u : 0u);
    } else {
        memcpy(&wide, &rest, 4);
        wide *= rebias;
        memcpy(&rest, &wide, 4);
    }
    rest |= sign;
    memcpy(&wide, &rest, 4);
    return wide;
}

DEVICE u32 narrow_f16(float wide) {
    u32 bits, sign, rest;
    memcpy(&bits, &wide, 4);
    sign = bits >> 16 & 0x8000u;
    rest = bits & 0x7fffffffu;
    if (rest > 0x7f800000u) /* a NaN: quiet, with its upper payload */
        return sign | 0x7e00u | (rest >> 13 & 0x3ffu);
    if (rest >= 0x47800000u) /* 65536 and more */
        return sign | 0x7c00u;
    if (rest < 0x38800000u) { /* below 2^-14: adding 0.5 leaves multiples of 2^-24, rounded to nearest even */
        float small;
        memcpy(&small, &rest, 4);
        small += 0.5f;
        memcpy(&rest, &small, 4);
        return sign | (rest - 0x3f000000u);
    }
    /* Carries increment the exponent; values from 65520 on become infinity. */
    return sign | ((rest + 0xfffu + (rest >> 13 & 1u)) - 0x38000000u) >> 13;
}

/* Runs a kernel over arrays of `bytes` bytes. */
void smddp_host_launch(void (*kernel)(const struct Args), u32 blocks, u32 threads, const struct Args *args, u64 bytes) {
    if (threads != THREADS)
        abort();
    running = args;
    extent = bytes;
    gridDim.x = blocks;
    for (blockIdx.x = 0; blockIdx.x < blocks; blockIdx.x++) {
        for (threadIdx.x = 0; threadIdx.x < threads; threadIdx.x++)
            kernel(*args);
    }
}
