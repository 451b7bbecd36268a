// Sixteen float32 values at a time, and the functions of one value.

#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>
#if defined(__AVX512F__) || defined(__AVX2__)
#include <immintrin.h>
#elif defined(__ARM_NEON)
#include <arm_neon.h>
#endif

namespace {

constexpr int64_t LANES = 16;
typedef float vf __attribute__((vector_size(64)));
typedef float vf_at __attribute__((vector_size(64), aligned(4), may_alias));
typedef int32_t vi __attribute__((vector_size(64)));
typedef uint32_t vu __attribute__((vector_size(64)));
typedef uint16_t vh_at __attribute__((vector_size(32), aligned(2), may_alias));

inline vf load(const float* p) { return *reinterpret_cast<const vf_at*>(p); }
inline vf load(const uint16_t* p) {  // bfloat16 is the upper half of a float32
    return reinterpret_cast<vf>(__builtin_convertvector(*reinterpret_cast<const vh_at*>(p), vu) << 16);
}
inline void store(float* p, vf x) { *reinterpret_cast<vf_at*>(p) = x; }
inline vf all(float x) { return x - vf{}; }

inline vf fma(vf a, vf b, vf c) {  // a * b + c, rounded once
#if defined(__AVX512F__)
    return reinterpret_cast<vf>(_mm512_fmadd_ps(reinterpret_cast<__m512>(a), reinterpret_cast<__m512>(b),
                                                reinterpret_cast<__m512>(c)));
#else
    float x[LANES], y[LANES], z[LANES];
    std::memcpy(x, &a, 64), std::memcpy(y, &b, 64), std::memcpy(z, &c, 64);
#if defined(__AVX2__) && defined(__FMA__)
    for (int i = 0; i < LANES; i += 8) {
        __m256 sum = _mm256_fmadd_ps(_mm256_loadu_ps(x + i), _mm256_loadu_ps(y + i), _mm256_loadu_ps(z + i));
        _mm256_storeu_ps(z + i, sum);
    }
#elif defined(__ARM_NEON)
    for (int i = 0; i < LANES; i += 4)
        vst1q_f32(z + i, vfmaq_f32(vld1q_f32(z + i), vld1q_f32(x + i), vld1q_f32(y + i)));
#else
    for (int i = 0; i < LANES; i++) z[i] = std::fmaf(x[i], y[i], z[i]);
#endif
    vf out;
    std::memcpy(&out, z, 64);
    return out;
#endif
}

inline float total(vf x) {
    x += __builtin_shuffle(x, vi{8, 9, 10, 11, 12, 13, 14, 15, 0, 1, 2, 3, 4, 5, 6, 7});
    x += __builtin_shuffle(x, vi{4, 5, 6, 7, 0, 1, 2, 3, 12, 13, 14, 15, 8, 9, 10, 11});
    x += __builtin_shuffle(x, vi{2, 3, 0, 1, 6, 7, 4, 5, 10, 11, 8, 9, 14, 15, 12, 13});
    x += __builtin_shuffle(x, vi{1, 0, 3, 2, 5, 4, 7, 6, 9, 8, 11, 10, 13, 12, 15, 14});
    return x[0];
}

// The last n < 16 values of a row, zeros behind them.
template <class T> inline vf load_some(const T* p, int64_t n) {
    T some[LANES] = {};
    std::memcpy(some, p, n * sizeof(T));
    return load(some);
}

inline void store_some(float* p, vf x, int64_t n) { std::memcpy(p, &x, n * sizeof(float)); }

// e^x; 0 below the smallest normal number, infinite above the largest, NaN of a NaN.
inline vf exponential(vf x) {
    const float low = -87.3365478515625f, high = 88.72283172607421875f, magic = 12582912.0f;
    vf held = x < low ? all(low) : x;
    held = held > high ? all(high) : held;
    vf n = fma(held, all(1.44269504088896341f), all(magic)) - magic;
    vf r = fma(n, all(-0.693145751953125f), held);
    r = fma(n, all(-1.42860682030941723e-6f), r);
    vf p = all(1.0f / 5040);
    for (float c : {1.0f / 720, 1.0f / 120, 1.0f / 24, 1.0f / 6, 0.5f, 1.0f, 1.0f}) p = fma(p, r, all(c));
    vi half = __builtin_convertvector(n, vi) >> 1, rest = __builtin_convertvector(n, vi) - half;
    p = p * reinterpret_cast<vf>((half + 127) << 23) * reinterpret_cast<vf>((rest + 127) << 23);
    p = x < low ? vf{} : p;
    p = x > high ? all(INFINITY) : p;
    return x == x ? p : x;
}

inline vf sigmoid(vf x) { return 1.0f / (1.0f + exponential(-x)); }
inline vf silu(vf x) { return x / (1.0f + exponential(-x)); }

// log(1 + e^x), x itself above 20: the larger of x and 0, plus log(1 + u) of u = e^-|x|, as 2 atanh(u / (2 + u)).
inline vf softplus(vf x) {
    vf u = exponential(x > 0 ? -x : x), s = u / (2.0f + u), square = s * s;
    vf p = all(1.0f / 17);
    for (float n : {15.0f, 13.0f, 11.0f, 9.0f, 7.0f, 5.0f, 3.0f}) p = fma(p, square, all(1.0f / n));
    vf out = (x > 0 ? x : vf{}) + 2.0f * fma(s * square, p, s);
    return x > 20.0f ? x : out;
}

// For each run of up to 16 of n: f(first, how many).
template <class F> inline void runs(int64_t n, F f) {
    for (int64_t i = 0; i < n; i += LANES) f(i, n - i < LANES ? n - i : LANES);
}
inline vf get(const float* p, int64_t n) { return n == LANES ? load(p) : load_some(p, n); }
inline void put(float* p, vf x, int64_t n) { n == LANES ? store(p, x) : store_some(p, x, n); }

inline float dot(const float* a, const float* b, int64_t n) {
    vf sum{};
    runs(n, [&](int64_t i, int64_t m) { sum = fma(get(a + i, m), get(b + i, m), sum); });
    return total(sum);
}

}  // namespace
