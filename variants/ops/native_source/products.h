// Products with a weight.

#pragma once
#include "lanes.h"

namespace {

// R rows of a weight by M rows of x. A tail is filled up with zeros, which change no sum.
template <class T, int R, int M>
inline void dots(const T* w, int64_t k, const float* x, int64_t x_row, float* y, int64_t y_row) {
    vf sum[R][M] = {};
    int64_t i = 0;
    for (; i + LANES <= k; i += LANES) {
        vf left[R];
        for (int r = 0; r < R; r++) {
            __builtin_prefetch(w + (R + r) * k + i);  // rows of the next turn: of short ones the processor fetches late
            left[r] = load(w + r * k + i);
        }
        for (int m = 0; m < M; m++) {
            vf right = load(x + m * x_row + i);
            for (int r = 0; r < R; r++) sum[r][m] = fma(left[r], right, sum[r][m]);
        }
    }
    if (i < k)
        for (int r = 0; r < R; r++)
            for (int m = 0; m < M; m++)
                sum[r][m] = fma(load_some(w + r * k + i, k - i), load_some(x + m * x_row + i, k - i), sum[r][m]);
    for (int r = 0; r < R; r++)
        for (int m = 0; m < M; m++) y[m * y_row + r] = total(sum[r][m]);
}

template <class T, int M>
inline void rows_of(const T* w, int64_t from, int64_t to, int64_t k, const float* x, float* y, int64_t y_row) {
    constexpr int R = M == 1 ? 8 : 4;
    int64_t r = from;
    for (; r + R <= to; r += R) dots<T, R, M>(w + r * k, k, x, k, y + r, y_row);
    for (; r < to; r++) dots<T, 1, M>(w + r * k, k, x, k, y + r, y_row);
}

// y [m, n] = x [m, k] by w [n, k], rows from..to of w.
template <class T>
void product_rows(const T* w, int64_t from, int64_t to, int64_t n, int64_t k, const float* x, int64_t m, float* y) {
    int64_t i = 0;
    for (; i + 4 <= m; i += 4) rows_of<T, 4>(w, from, to, k, x + i * k, y + i * n, n);
    for (; i < m; i++) rows_of<T, 1>(w, from, to, k, x + i * k, y + i * n, n);
}

void product(const void* w, bool narrow, int64_t from, int64_t to, int64_t n, int64_t k, const float* x, int64_t m,
             float* y) {
    if (narrow) product_rows(static_cast<const uint16_t*>(w), from, to, n, k, x, m, y);
    else product_rows(static_cast<const float*>(w), from, to, n, k, x, m, y);
}

}  // namespace
