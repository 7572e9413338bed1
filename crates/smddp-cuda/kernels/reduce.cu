/* The reductions of device memory: one kernel for each (element, fold), all from one pattern. And small copies,
 * and what floats are rounded to before they travel between nodes in a format.
 *
 * The arithmetic is that of smddp-core's reduce module, bit for bit; only where a sum or a product is a NaN, which NaN
 * is the choice of whoever computes. `scripts/kernels.py` makes reduce.ptx of this file. smddp-core's tests compile it
 * as C for the host (host.h) and hold it to the processor's own kernels: so it is written in what C and CUDA C++ have
 * in common, patterns are macros, and for a device nothing is included.
 *
 * Speed. A kernel has eight blocks at most if nobody says otherwise, so that it takes eight multiprocessors. What one of them reads in a
 * second is what it has in flight divided by the latency: about 0.7 us to its own memory, about 2 us to a peer's. So a
 * thread asks for BATCH sources, up to four packs of 16 bytes each, before it folds the first: with 512 threads in a
 * block that is 128 KiB in flight, half of the registers. For four sources or more that should reach the 64 bytes a
 * cycle that a multiprocessor takes from the second cache (110 GB/s), or some 50 GB/s from a peer, where the latency is
 * the limit. These figures are computed; on an H200 a multiprocessor moved 59 GB/s, read and written
 * (bench/results/gpu.json).
 */

typedef unsigned int u32;
typedef unsigned long long u64;
typedef signed int i32;
typedef signed long long i64;

#define SOURCES 16
/* Threads of every block; kernels.rs has the same number. */
#define THREADS 512
/* Sources whose loads are in flight together. */
#define BATCH 4

/* What one launch is told; kernels.rs has the same. Lengths are in the kernel's own elements. */
struct Args {
    u64 sources[SOURCES];
    u64 to;
    u64 count;
    /* Elements before the first whole pack, and the number of packs after them. What remains goes one by one: the ends,
     * or all where there are no packs. */
    u64 head;
    u64 packs;
    double times;
    u32 n;
    u32 finish;
    u32 divide;
    u32 unused;
};

/* Values of `finish`. */
#define KEEP 0
#define DIVIDE 1
#define TIMES 2

/* Sixteen bytes, aligned to as many. */
struct Pack {
    u32 word[4];
};

#ifdef __CUDACC_RTC__

#define DEVICE static __device__ __forceinline__
#define ENTRY(name) \
    extern "C" __global__ void __launch_bounds__(THREADS, 1) name(const __grid_constant__ struct Args args)

/* The order of these among themselves is kept: loads of a turn come before its stores. Packs are read once, so they do
 * not go into the first cache; single elements share its lines with their neighbours. */
DEVICE struct Pack load_pack(u64 from) {
    struct Pack pack;
    asm volatile("ld.global.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(pack.word[0]), "=r"(pack.word[1]), "=r"(pack.word[2]), "=r"(pack.word[3])
                 : "l"(from));
    return pack;
}

DEVICE void store_pack(u64 to, struct Pack pack) {
    asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};"
                 :
                 : "l"(to), "r"(pack.word[0]), "r"(pack.word[1]), "r"(pack.word[2]), "r"(pack.word[3])
                 : "memory");
}

DEVICE u32 load_8(u64 from) {
    u32 bits;
    asm volatile("ld.global.u8 %0, [%1];" : "=r"(bits) : "l"(from));
    return bits;
}

DEVICE u32 load_16(u64 from) {
    u32 bits;
    asm volatile("{.reg .u16 half; ld.global.u16 half, [%1]; cvt.u32.u16 %0, half;}" : "=r"(bits) : "l"(from));
    return bits;
}

DEVICE u32 load_32(u64 from) {
    u32 bits;
    asm volatile("ld.global.u32 %0, [%1];" : "=r"(bits) : "l"(from));
    return bits;
}

DEVICE u64 load_64(u64 from) {
    u64 bits;
    asm volatile("ld.global.u64 %0, [%1];" : "=l"(bits) : "l"(from));
    return bits;
}

DEVICE void store_8(u64 to, u32 bits) {
    asm volatile("st.global.u8 [%0], %1;" : : "l"(to), "r"(bits) : "memory");
}

DEVICE void store_16(u64 to, u32 bits) {
    asm volatile("{.reg .u16 half; cvt.u16.u32 half, %1; st.global.u16 [%0], half;}" : : "l"(to), "r"(bits) : "memory");
}

DEVICE void store_32(u64 to, u32 bits) {
    asm volatile("st.global.u32 [%0], %1;" : : "l"(to), "r"(bits) : "memory");
}

DEVICE void store_64(u64 to, u64 bits) {
    asm volatile("st.global.u64 [%0], %1;" : : "l"(to), "l"(bits) : "memory");
}

DEVICE float widen_f16(u32 bits) {
    float wide;
    asm("{.reg .b16 half; cvt.u16.u32 half, %1; cvt.f32.f16 %0, half;}" : "=f"(wide) : "r"(bits));
    return wide;
}

/* Rounds to nearest even. */
DEVICE u32 narrow_f16(float wide) {
    u32 bits;
    asm("{.reg .b16 half; cvt.rn.f16.f32 half, %1; cvt.u32.u16 %0, half;}" : "=r"(bits) : "f"(wide));
    return bits;
}

#else
#include "host.h"
#endif

/* ---- bits and numbers ---- */

union Bits32 {
    u32 bits;
    float number;
};

union Bits64 {
    u64 bits;
    double number;
};

DEVICE float to_f32(u32 bits) {
    union Bits32 both;
    both.bits = bits;
    return both.number;
}

DEVICE u32 of_f32(float number) {
    union Bits32 both;
    both.number = number;
    return both.bits;
}

DEVICE double to_f64(u64 bits) {
    union Bits64 both;
    both.bits = bits;
    return both.number;
}

DEVICE u64 of_f64(double number) {
    union Bits64 both;
    both.number = number;
    return both.bits;
}

DEVICE float widen_bf16(u32 bits) {
    return to_f32(bits << 16);
}

/* To nearest even. Rounding could carry a NaN into an infinity, so that one becomes quiet instead. */
DEVICE u32 narrow_bf16(float wide) {
    u32 bits = of_f32(wide);
    u32 rounded = bits + 0x7fffu + ((bits >> 16) & 1u);
    u32 quiet = bits | 0x00400000u;
    return (wide != wide ? quiet : rounded) >> 16;
}

/* ---- elements: the bits in memory, and the accumulator ---- */

/* Element k of a pack, and packs of elements, by the width of an element's bits. */
#define GET_8(pack, k) (((pack).word[(k) / 4] >> 8 * ((k) % 4)) & 0xffu)
#define GET_16(pack, k) (((pack).word[(k) / 2] >> 16 * ((k) % 2)) & 0xffffu)
#define GET_32(pack, k) ((pack).word[k])
#define GET_64(pack, k) ((pack).word[2 * (k)] | (u64)(pack).word[2 * (k) + 1] << 32)
#define GET_128(pack, k) (pack)

#define PUT_8(pack, k, bits) ((pack).word[(k) / 4] |= (u32)(bits) << 8 * ((k) % 4))
#define PUT_16(pack, k, bits) ((pack).word[(k) / 2] |= (u32)(bits) << 16 * ((k) % 2))
#define PUT_32(pack, k, bits) ((pack).word[k] = (bits))
#define PUT_64(pack, k, bits) put_64(&(pack), k, bits)
#define PUT_128(pack, k, bits) ((pack) = (bits))

DEVICE void put_64(struct Pack *pack, int k, u64 bits) {
    pack->word[2 * k] = (u32)bits;
    pack->word[2 * k + 1] = (u32)(bits >> 32);
}

/* Two doubles, which need no alignment beyond that of one. */
DEVICE struct Pack load_128(u64 from) {
    struct Pack pack;
    put_64(&pack, 0, load_64(from));
    put_64(&pack, 1, load_64(from + 8));
    return pack;
}

DEVICE void store_128(u64 to, struct Pack pack) {
    store_64(to, GET_64(pack, 0));
    store_64(to + 8, GET_64(pack, 1));
}

#define RAW_8 u32
#define RAW_16 u32
#define RAW_32 u32
#define RAW_64 u64
#define RAW_128 struct Pack

/* For each element: its accumulator, how bits become one and how one becomes bits. */
#define ACC_f32 float
#define WIDEN_f32(bits) to_f32(bits)
#define NARROW_f32(acc) of_f32(acc)
#define ACC_f64 double
#define WIDEN_f64(bits) to_f64(bits)
#define NARROW_f64(acc) of_f64(acc)
#define ACC_f16 float
#define WIDEN_f16(bits) widen_f16(bits)
#define NARROW_f16(acc) narrow_f16(acc)
#define ACC_bf16 float
#define WIDEN_bf16(bits) widen_bf16(bits)
#define NARROW_bf16(acc) narrow_bf16(acc)

/* An f16 that is only compared: it stays as it is, but a NaN becomes quiet, as when it is widened and narrowed. */
#define ACC_half u32
#define WIDEN_half(bits) (bits)
#define NARROW_half(acc) (((acc)&0x7fffu) > 0x7c00u ? (acc) | 0x0200u : (acc))

#define ACC_u8 u32
#define WIDEN_u8(bits) (bits)
#define NARROW_u8(acc) ((acc)&0xffu)
#define ACC_u16 u32
#define WIDEN_u16(bits) (bits)
#define NARROW_u16(acc) ((acc)&0xffffu)
#define ACC_u32 u32
#define WIDEN_u32(bits) (bits)
#define NARROW_u32(acc) (acc)
#define ACC_u64 u64
#define WIDEN_u64(bits) (bits)
#define NARROW_u64(acc) (acc)
#define ACC_i8 i32
#define WIDEN_i8(bits) ((i32)(signed char)(bits))
#define NARROW_i8(acc) ((u32)(acc)&0xffu)
#define ACC_i16 i32
#define WIDEN_i16(bits) ((i32)(short)(bits))
#define NARROW_i16(acc) ((u32)(acc)&0xffffu)
#define ACC_i32 i32
#define WIDEN_i32(bits) ((i32)(bits))
#define NARROW_i32(acc) ((u32)(acc))
#define ACC_i64 i64
#define WIDEN_i64(bits) ((i64)(bits))
#define NARROW_i64(acc) ((u64)(acc))

/* Truths, four at once in a word: a byte is true if it is not 0; results are 0 or 1. */
#define ACC_truths u32
#define WIDEN_truths(bits) truths(bits)
#define NARROW_truths(acc) (acc)
#define ACC_truth u32
#define WIDEN_truth(bits) ((bits) != 0u ? 1u : 0u)
#define NARROW_truth(acc) (acc)

DEVICE u32 truths(u32 bytes) {
    u32 any = ((bytes & 0x7f7f7f7fu) + 0x7f7f7f7fu) | bytes;
    return (any >> 7) & 0x01010101u;
}

struct Complex32 {
    float re, im;
};

struct Complex64 {
    double re, im;
};

#define ACC_c64 struct Complex32
#define WIDEN_c64(bits) widen_c64(bits)
#define NARROW_c64(acc) (of_f32((acc).re) | (u64)of_f32((acc).im) << 32)
#define ACC_c128 struct Complex64
#define WIDEN_c128(bits) widen_c128(bits)
#define NARROW_c128(acc) narrow_c128(acc)

DEVICE struct Complex32 widen_c64(u64 bits) {
    struct Complex32 acc;
    acc.re = to_f32((u32)bits);
    acc.im = to_f32((u32)(bits >> 32));
    return acc;
}

DEVICE struct Complex64 widen_c128(struct Pack pack) {
    struct Complex64 acc;
    acc.re = to_f64(GET_64(pack, 0));
    acc.im = to_f64(GET_64(pack, 1));
    return acc;
}

DEVICE struct Pack narrow_c128(struct Complex64 acc) {
    struct Pack pack;
    put_64(&pack, 0, of_f64(acc.re));
    put_64(&pack, 1, of_f64(acc.im));
    return pack;
}

/* ---- folds of two accumulators ---- */

#define FOLD_sum(a, b) ((a) + (b))
#define FOLD_prod(a, b) ((a) * (b))
#define FOLD_least(a, b) ((b) < (a) ? (b) : (a))
#define FOLD_most(a, b) ((b) > (a) ? (b) : (a))
/* Of floats: a NaN on either side is the result, and the earlier of two equal values (0.0 and -0.0). */
#define FOLD_min(a, b) (((b) < (a)) | ((b) != (b)) ? (b) : (a))
#define FOLD_max(a, b) (((b) > (a)) | ((b) != (b)) ? (b) : (a))
#define FOLD_min_half(a, b) min_half(a, b)
#define FOLD_max_half(a, b) max_half(a, b)
#define FOLD_band(a, b) ((a) & (b))
#define FOLD_bor(a, b) ((a) | (b))
#define FOLD_bxor(a, b) ((a) ^ (b))
#define FOLD_prod_c64(a, b) prod_c64(a, b)
#define FOLD_prod_c128(a, b) prod_c128(a, b)

DEVICE u32 min_half(u32 a, u32 b) {
    float before = widen_f16(a), next = widen_f16(b);
    return ((next < before) | (next != next)) ? b : a;
}

DEVICE u32 max_half(u32 a, u32 b) {
    float before = widen_f16(a), next = widen_f16(b);
    return ((next > before) | (next != next)) ? b : a;
}

DEVICE struct Complex32 prod_c64(struct Complex32 a, struct Complex32 b) {
    struct Complex32 acc;
    acc.re = a.re * b.re - a.im * b.im;
    acc.im = a.re * b.im + a.im * b.re;
    return acc;
}

DEVICE struct Complex64 prod_c128(struct Complex64 a, struct Complex64 b) {
    struct Complex64 acc;
    acc.re = a.re * b.re - a.im * b.im;
    acc.im = a.re * b.im + a.im * b.re;
    return acc;
}

/* ---- the last step of a sum ---- */

#define FINISH_none(acc, args) (acc)
#define FINISH_f32(acc, args) finish_f32(acc, args)
#define FINISH_f64(acc, args) finish_f64(acc, args)
#define FINISH_f16(acc, args) finish_f32(acc, args)
#define FINISH_bf16(acc, args) finish_f32(acc, args)

DEVICE float finish_f32(float acc, const struct Args *args) {
    if (args->finish == DIVIDE)
        return acc / (float)args->divide;
    if (args->finish == TIMES)
        return acc * (float)args->times;
    return acc;
}

DEVICE double finish_f64(double acc, const struct Args *args) {
    if (args->finish == DIVIDE)
        return acc / (double)args->divide;
    if (args->finish == TIMES)
        return acc * args->times;
    return acc;
}

/* Integers wrap first; they divide truncating, and multiply in f64: truncating, saturating, and 0 for a NaN. `end` is
 * the first whole number above the type's, which f64 has exactly. They accumulate without a sign, where C wraps too. */
#define INTEGER(element, bits, type, number, quotient, low, high, end)  \
    DEVICE bits finish_##element(bits acc, const struct Args *args) {   \
        number whole = (number)(type)acc;                               \
        if (args->finish == DIVIDE)                                     \
            return (bits)quotient(whole, args->divide);                 \
        if (args->finish == TIMES) {                                    \
            double product = (double)whole * args->times;               \
            if (product != product)                                     \
                return 0;                                               \
            if (product <= (double)(low))                               \
                return (bits)(low);                                     \
            return (bits)(product >= (end) ? (high) : (number)product); \
        }                                                               \
        return acc;                                                     \
    }

DEVICE u32 quotient_u32(u32 a, u32 n) {
    return a / n;
}

DEVICE u64 quotient_u64(u64 a, u32 n) {
    return a / n;
}

DEVICE u32 quotient_i32(i32 a, u32 n) {
    u32 whole = (a < 0 ? 0u - (u32)a : (u32)a) / n;
    return a < 0 ? 0u - whole : whole;
}

DEVICE u64 quotient_i64(i64 a, u32 n) {
    u64 whole = (a < 0 ? 0ull - (u64)a : (u64)a) / n;
    return a < 0 ? 0ull - whole : whole;
}

INTEGER(u8, u32, unsigned char, u32, quotient_u32, 0, 0xffu, 256.0)
INTEGER(u16, u32, unsigned short, u32, quotient_u32, 0, 0xffffu, 65536.0)
INTEGER(u32, u32, u32, u32, quotient_u32, 0, 0xffffffffu, 4294967296.0)
INTEGER(u64, u64, u64, u64, quotient_u64, 0, 0xffffffffffffffffull, 18446744073709551616.0)
INTEGER(i8, u32, signed char, i32, quotient_i32, -128, 127, 128.0)
INTEGER(i16, u32, short, i32, quotient_i32, -32768, 32767, 32768.0)
INTEGER(i32, u32, i32, i32, quotient_i32, -2147483647 - 1, 2147483647, 2147483648.0)
INTEGER(i64, u64, i64, i64, quotient_i64, -9223372036854775807ll - 1, 9223372036854775807ll, 9223372036854775808.0)

#define FINISH_u8(acc, args) finish_u8(acc, args)
#define FINISH_u16(acc, args) finish_u16(acc, args)
#define FINISH_u32(acc, args) finish_u32(acc, args)
#define FINISH_u64(acc, args) finish_u64(acc, args)
#define FINISH_i8(acc, args) finish_i8(acc, args)
#define FINISH_i16(acc, args) finish_i16(acc, args)
#define FINISH_i32(acc, args) finish_i32(acc, args)
#define FINISH_i64(acc, args) finish_i64(acc, args)

/* ---- the pattern ---- */

#define UNROLL _Pragma("unroll")

/* Folds `units` units of `width` elements each, which begin `from` bytes into every source, by all threads of the grid.
 * A thread has `deep` units in a turn, a grid apart, so that neighbours read neighbours and a short call is spread over
 * all blocks. In the last turn a thread without a unit reads the last one over again, which costs less than a branch at
 * every load, and writes nothing. */
#define PASS(name, deep, width, bytes, raw, blank, load, store, get, put, element, fold, finish) \
    DEVICE void name(const struct Args *args, u64 from, u64 units) {                             \
        const u64 threads = (u64)gridDim.x * THREADS;                                            \
        u64 first = (u64)blockIdx.x * THREADS + threadIdx.x;                                     \
        for (; first < units; first += threads * (deep)) {                                       \
            u64 offset[deep];                                                                    \
            ACC_##element acc[deep][width];                                                      \
            UNROLL for (int d = 0; d < (deep); d++) {                                            \
                u64 unit = first + threads * d;                                                  \
                offset[d] = from + (unit < units ? unit : units - 1) * (bytes);                  \
            }                                                                                    \
            for (u32 s = 0; s < args->n; s += BATCH) {                                           \
                raw in[BATCH][deep];                                                             \
                UNROLL for (int b = 0; b < BATCH; b++) {                                         \
                    if (s + b < args->n) {                                                       \
                        UNROLL for (int d = 0; d < (deep); d++) {                                \
                            in[b][d] = load(args->sources[s + b] + offset[d]);                   \
                        }                                                                        \
                    }                                                                            \
                }                                                                                \
                UNROLL for (int b = 0; b < BATCH; b++) {                                         \
                    if (b == 0 && s == 0) {                                                      \
                        UNROLL for (int d = 0; d < (deep); d++) {                                \
                            UNROLL for (int k = 0; k < (width); k++) {                           \
                                acc[d][k] = WIDEN_##element(get(in[b][d], k));                   \
                            }                                                                    \
                        }                                                                        \
                    } else if (s + b < args->n) {                                                \
                        UNROLL for (int d = 0; d < (deep); d++) {                                \
                            UNROLL for (int k = 0; k < (width); k++) {                           \
                                ACC_##element next = WIDEN_##element(get(in[b][d], k));          \
                                acc[d][k] = FOLD_##fold(acc[d][k], next);                        \
                            }                                                                    \
                        }                                                                        \
                    }                                                                            \
                }                                                                                \
            }                                                                                    \
            UNROLL for (int d = 0; d < (deep); d++) {                                            \
                raw out = blank;                                                                 \
                UNROLL for (int k = 0; k < (width); k++) {                                       \
                    ACC_##element all = FINISH_##finish(acc[d][k], args);                        \
                    put(out, k, NARROW_##element(all));                                          \
                }                                                                                \
                if (first + threads * d < units)                                                 \
                    store(args->to + offset[d], out);                                            \
            }                                                                                    \
        }                                                                                        \
    }

#define BLANK_PACK {{0, 0, 0, 0}}
#define BLANK_8 0
#define BLANK_16 0
#define BLANK_32 0
#define BLANK_64 0
#define BLANK_128 BLANK_PACK
#define GET_ONE(one, k) (one)
#define PUT_ONE(one, k, bits) ((one) = (bits))

/* A kernel for packs of elements of `bits`, `deep` packs in a turn, and for single elements of `bits1`, `deep1` in a
 * turn: as many as the registers hold for the sums of floats, which is what training does, and fewer for the rest. */
#define KERNEL(name, deep, deep1, bits, element, bits1, element1, fold, finish)                              \
    PASS(name##_packs, deep, 128 / bits, 16, struct Pack, BLANK_PACK, load_pack, store_pack, GET_##bits,     \
         PUT_##bits, element, fold, finish)                                                                  \
    PASS(name##_ones, deep1, 1, bits1 / 8, RAW_##bits1, BLANK_##bits1, load_##bits1, store_##bits1, GET_ONE, \
         PUT_ONE, element1, fold, finish)                                                                    \
    ENTRY(smddp_##name) {                                                                                    \
        const u64 after = args.head + args.packs * (128 / bits1);                                            \
        name##_packs(&args, args.head * (bits1 / 8), args.packs);                                            \
        /* Not unrolled: the two ends are one piece of code. */                                              \
        _Pragma("unroll 1") for (int end = 0; end < 2; end++) {                                              \
            name##_ones(&args, end ? after * (bits1 / 8) : 0, end ? args.count - after : args.head);         \
        }                                                                                                    \
    }

#define REAL(name, deep, deep1, bits, element, fold, finish) \
    KERNEL(name, deep, deep1, bits, element, bits, element, fold, finish)

/* ---- the kernels; kernels.rs knows their names ---- */

/* Also complex sums, by parts. */
REAL(sum_f32, 4, 8, 32, f32, sum, f32)
REAL(sum_f64, 4, 4, 64, f64, sum, f64)
REAL(sum_f16, 4, 8, 16, f16, sum, f16)
REAL(sum_bf16, 4, 8, 16, bf16, sum, bf16)
REAL(sum_u8, 1, 2, 8, u8, sum, u8)
REAL(sum_u16, 1, 2, 16, u16, sum, u16)
REAL(sum_u32, 1, 2, 32, u32, sum, u32)
REAL(sum_u64, 1, 1, 64, u64, sum, u64)
REAL(sum_i8, 1, 2, 8, u8, sum, i8)
REAL(sum_i16, 1, 2, 16, u16, sum, i16)
REAL(sum_i32, 1, 2, 32, u32, sum, i32)
REAL(sum_i64, 1, 1, 64, u64, sum, i64)

/* Integers multiply with the same bits whatever their sign. */
REAL(prod_f32, 2, 4, 32, f32, prod, none)
REAL(prod_f64, 2, 2, 64, f64, prod, none)
REAL(prod_f16, 2, 4, 16, f16, prod, none)
REAL(prod_bf16, 2, 4, 16, bf16, prod, none)
REAL(prod_u8, 1, 2, 8, u8, prod, none)
REAL(prod_u16, 1, 2, 16, u16, prod, none)
REAL(prod_u32, 1, 2, 32, u32, prod, none)
REAL(prod_u64, 1, 1, 64, u64, prod, none)
REAL(prod_c64, 1, 1, 64, c64, prod_c64, none)
REAL(prod_c128, 1, 1, 128, c128, prod_c128, none)

REAL(min_f32, 2, 4, 32, f32, min, none)
REAL(min_f64, 2, 2, 64, f64, min, none)
REAL(min_f16, 2, 4, 16, half, min_half, none)
REAL(min_bf16, 2, 4, 16, bf16, min, none)
REAL(min_u8, 1, 2, 8, u8, least, none)
REAL(min_u16, 1, 2, 16, u16, least, none)
REAL(min_u32, 1, 2, 32, u32, least, none)
REAL(min_u64, 1, 1, 64, u64, least, none)
REAL(min_i8, 1, 2, 8, i8, least, none)
REAL(min_i16, 1, 2, 16, i16, least, none)
REAL(min_i32, 1, 2, 32, i32, least, none)
REAL(min_i64, 1, 1, 64, i64, least, none)

REAL(max_f32, 2, 4, 32, f32, max, none)
REAL(max_f64, 2, 2, 64, f64, max, none)
REAL(max_f16, 2, 4, 16, half, max_half, none)
REAL(max_bf16, 2, 4, 16, bf16, max, none)
REAL(max_u8, 1, 2, 8, u8, most, none)
REAL(max_u16, 1, 2, 16, u16, most, none)
REAL(max_u32, 1, 2, 32, u32, most, none)
REAL(max_u64, 1, 1, 64, u64, most, none)
REAL(max_i8, 1, 2, 8, i8, most, none)
REAL(max_i16, 1, 2, 16, i16, most, none)
REAL(max_i32, 1, 2, 32, i32, most, none)
REAL(max_i64, 1, 1, 64, i64, most, none)

/* Bits of any integer, by bytes. */
KERNEL(band, 2, 4, 32, u32, 8, u8, band, none)
KERNEL(bor, 2, 4, 32, u32, 8, u8, bor, none)
KERNEL(bxor, 2, 4, 32, u32, 8, u8, bxor, none)

KERNEL(bool_band, 2, 4, 32, truths, 8, truth, band, none)
KERNEL(bool_bor, 2, 4, 32, truths, 8, truth, bor, none)
KERNEL(bool_bxor, 2, 4, 32, truths, 8, truth, bxor, none)

/* ---- small copies ---- */

/* The units of one copy that are this thread's, four in flight. As in a pass, a thread without a unit reads the last one. */
#define MOVE(name, bytes, raw, load, store)                                           \
    DEVICE void name(u64 to, u64 from, u64 units, u64 first, u64 threads) {           \
        for (; first < units; first += threads * 4) {                                 \
            raw in[4];                                                                \
            UNROLL for (int d = 0; d < 4; d++) {                                      \
                u64 unit = first + threads * d;                                       \
                in[d] = load(from + (unit < units ? unit : units - 1) * (bytes));     \
            }                                                                         \
            UNROLL for (int d = 0; d < 4; d++) {                                      \
                if (first + threads * d < units)                                      \
                    store(to + (first + threads * d) * (bytes), in[d]);               \
            }                                                                         \
        }                                                                             \
    }

MOVE(move_packs, 16, struct Pack, load_pack, store_pack)
MOVE(move_words, 4, u32, load_32, store_32)
MOVE(move_bytes, 1, u32, load_8, store_8)

/* `n` copies of `count` bytes each: `sources` are where one is from and where it goes, by turns. `packs` of `finish` bytes,
 * to which all addresses are aligned, then what remains. Blocks are dealt out to the copies. */
ENTRY(smddp_copy) {
    const u32 which = blockIdx.x % args.n;
    const u64 from = args.sources[2 * which], to = args.sources[2 * which + 1];
    const u64 first = (u64)(blockIdx.x / args.n) * THREADS + threadIdx.x;
    const u64 threads = (u64)(gridDim.x / args.n) * THREADS;
    const u64 whole = args.packs * args.finish;
    if (args.finish == 16)
        move_packs(to, from, args.packs, first, threads);
    else
        move_words(to, from, args.packs, first, threads);
    move_bytes(to + whole, from + whole, args.count - whole, first, threads);
}

/* ---- formats: 32-bit floats as they come out of one (smddp-core's reduce/coding) ---- */

#define ROUND(name, rounded)                                                                \
    ENTRY(smddp_##name##_f32) {                                                             \
        const u64 threads = (u64)gridDim.x * THREADS;                                       \
        u64 first = (u64)blockIdx.x * THREADS + threadIdx.x;                                \
        for (; first < args.count; first += threads * 4) {                                  \
            u32 in[4];                                                                      \
            UNROLL for (int d = 0; d < 4; d++) {                                            \
                u64 at = first + threads * d;                                               \
                in[d] = load_32(args.sources[0] + (at < args.count ? at : args.count - 1) * 4); \
            }                                                                               \
            UNROLL for (int d = 0; d < 4; d++) {                                            \
                if (first + threads * d < args.count)                                       \
                    store_32(args.to + (first + threads * d) * 4, rounded(in[d]));          \
            }                                                                               \
        }                                                                                   \
    }

#define ROUNDED_BF16(bits) of_f32(widen_bf16(narrow_bf16(to_f32(bits))))
#define ROUNDED_F16(bits) of_f32(widen_f16(narrow_f16(to_f32(bits))))

ROUND(bf16, ROUNDED_BF16)
ROUND(f16, ROUNDED_F16)

/* Elements with one scale; smddp-plan's format has the same. */
#define GROUP 256
#define MAGNITUDE 0x7fffffffu
#define INFINITE 0x7f800000u

/* A thread has a group, whose largest element decides about all. */
ENTRY(smddp_int8_f32) {
    const u64 threads = (u64)gridDim.x * THREADS, groups = (args.count + GROUP - 1) / GROUP;
    u64 group = (u64)blockIdx.x * THREADS + threadIdx.x;
    for (; group < groups; group += threads) {
        const u64 from = args.sources[0] + group * GROUP * 4, to = args.to + group * GROUP * 4;
        const u64 left = args.count - group * GROUP;
        const u32 n = left < GROUP ? (u32)left : GROUP;
        u32 most = 0;
        _Pragma("unroll 8") for (u32 i = 0; i < n; i++) {
            u32 size = load_32(from + i * 4) & MAGNITUDE;
            most = size > most ? size : most;
        }
        float scale = 0.0f, inverse = 0.0f;
        if (most >= INFINITE) {
            scale = to_f32(0x7fc00000u);
        } else if (most >= (127u - 100) << 23) {
            const u32 exact = of_f32(to_f32(most) / 127.0f);
            const float above = to_f32((exact + 0xffu) & ~0xffu);
            scale = (of_f32(127.0f * above) & MAGNITUDE) < INFINITE ? above : to_f32(exact & ~0xffu);
            inverse = 1.0f / scale;
        }
        _Pragma("unroll 8") for (u32 i = 0; i < n; i++) {
            /* 1.5 * 2^23: the nearest whole number is left in the lowest bits. */
            const u32 sum = of_f32(to_f32(load_32(from + i * 4)) * inverse + 12582912.0f);
            const i32 whole = (i32)(sum << 24) >> 24;
            store_32(to + i * 4, of_f32((float)whole * scale));
        }
    }
}
