// Kernels of a float32 forward on the CPU: what a decode step of one sequence is made of, and the same for more tokens.
//
// Every result is computed alone and in one order, whatever lies beside it, and whatever the width of the processor's
// registers: a sum has 16 lanes (lane l takes the terms l, l + 16, ...), which are then added in halves. So bits do not
// follow batch, prompt length, threads or instruction set. Weights are read as they are stored, bfloat16 or float32.
// Nothing is contracted by the compiler (-ffp-contract=off); where two operations are one, `fma` says so.

#include "crew.h"
#include "elementwise.h"
#include "mixers.h"
#include "products.h"

namespace {

constexpr int64_t SHARE = 32;  // rows of a weight in a part
constexpr int64_t MOST = 64;   // parts

void linear_part(const Op& o, int part, int parts) {  // x [M, K], w [N, K] -> y [M, N]; n: M, N, K, narrow
    int64_t n = o.n[1], groups = (n + SHARE - 1) / SHARE;
    int64_t from = groups * part / parts * SHARE, to = groups * (part + 1) / parts * SHARE;
    product(o.p[1], o.n[3], from, to < n ? to : n, n, o.n[2], at<const float>(o, 0), o.n[0], at<float>(o, 2));
}

void linear(const Op& o, int workers) {
    int64_t groups = (o.n[1] + SHARE - 1) / SHARE, parts = groups < MOST ? groups : MOST;
    crew->run(workers, static_cast<int>(parts), linear_part, o);
}

// x [N, D], ids [N, k], weights [N, k], w13 [E, 2 I, D], w2 [E, D, I] -> y [N, D]; n: N, D, I, k, narrow;
// scratch: 3 I + D values a token. Slots first to last.
void experts(const Op& o) {
    int64_t d = o.n[1], inner = o.n[2], k = o.n[3], size = o.n[4] ? 2 : 4;
    float *both = at<float>(o, 6), *act = both + 2 * inner, *down = act + inner;
    for (int64_t r = 0; r < o.n[0]; r++) {
        float* y = at<float>(o, 5) + r * d;
        for (int64_t j = 0; j < k; j++) {
            int64_t e = at<const int64_t>(o, 1)[r * k + j];
            float weight = at<const float>(o, 2)[r * k + j];
            const char* up = at<const char>(o, 3) + e * 2 * inner * d * size;
            const char* out = at<const char>(o, 4) + e * d * inner * size;
            product(up, o.n[4], 0, 2 * inner, 2 * inner, d, at<const float>(o, 0) + r * d, 1, both);
            act_row(both, both + inner, act, inner);
            product(out, o.n[4], 0, d, d, inner, act, 1, down);
            runs(d, [&](int64_t i, int64_t m) {
                vf term = get(down + i, m) * weight;
                put(y + i, j ? get(y + i, m) + term : term, m);
            });
        }
    }
}

void one(const Op& o, int workers) {
    switch (o.code) {
        case 0: return embed(o);
        case 1: return rms_norm(o);
        case 2: return linear(o, workers);
        case 3: return short_conv(o);
        case 4: return delta_rule(o);
        case 5: return gated_rms_norm(o);
        case 6: return attention(o);
        case 7: return silu_and_mul(o);
        case 8: return route(o);
        case 9: return experts(o);
        case 10: return add(o);
        case 11: return append(o);
        case 12: return finish(o);
    }
}

}  // namespace

extern "C" {

int64_t neartie_op_size() { return sizeof(Op); }

// `times` times the operations first to last, by so many threads; 0, or 1 where memory or a thread was not to be had.
int64_t neartie_run(const Op* ops, int64_t count, int64_t times, int64_t workers) {
    try {
        for (int64_t t = 0; t < times; t++)
            for (int64_t i = 0; i < count; i++) one(ops[i], static_cast<int>(workers));
    } catch (...) {
        return 1;
    }
    return 0;
}
}
