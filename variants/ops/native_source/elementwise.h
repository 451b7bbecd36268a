// What goes value by value: embedding, norms, activation, sum, convolution, router, the cells of a cache, the choice.

#pragma once
#include <vector>

#include "lanes.h"
#include "op.h"

namespace {

void norm_row(const float* x, const float* weight, float* y, int64_t d, float eps) {
    float rstd = 1.0f / std::sqrt(dot(x, x, d) / static_cast<float>(d) + eps);
    runs(d, [&](int64_t i, int64_t m) { put(y + i, get(x + i, m) * rstd * get(weight + i, m), m); });
}

void embed(const Op& o) {  // token, table -> x; n: D, narrow
    int64_t d = o.n[0], row = *at<const int64_t>(o, 0) * d;
    float* x = at<float>(o, 2);
    if (o.n[1]) runs(d, [&](int64_t i, int64_t m) {
        const uint16_t* from = at<const uint16_t>(o, 1) + row + i;
        put(x + i, m == LANES ? load(from) : load_some(from, m), m);
    });
    else std::memcpy(x, at<const float>(o, 1) + row, d * sizeof(float));
}

void rms_norm(const Op& o) {  // x [N, D], weight -> y; n: N, D; f: eps
    for (int64_t r = 0; r < o.n[0]; r++)
        norm_row(at<const float>(o, 0) + r * o.n[1], at<const float>(o, 1), at<float>(o, 2) + r * o.n[1], o.n[1],
                 static_cast<float>(o.f[0]));
}

void gated_rms_norm(const Op& o) {  // x [N, V], weight, gate [N, V] -> y; n: N, V; f: eps
    int64_t d = o.n[1];
    for (int64_t r = 0; r < o.n[0]; r++) {
        const float *x = at<const float>(o, 0) + r * d, *weight = at<const float>(o, 1);
        const float* gate = at<const float>(o, 2) + r * d;
        float* y = at<float>(o, 3) + r * d;
        norm_row(x, weight, y, d, static_cast<float>(o.f[0]));
        runs(d, [&](int64_t i, int64_t m) { put(y + i, get(y + i, m) * sigmoid(get(gate + i, m)), m); });
    }
}

void act_row(const float* gate, const float* up, float* y, int64_t d) {
    runs(d, [&](int64_t i, int64_t m) { put(y + i, silu(get(gate + i, m)) * get(up + i, m), m); });
}

void silu_and_mul(const Op& o) { act_row(at<const float>(o, 0), at<const float>(o, 1), at<float>(o, 2), o.n[0]); }

void add(const Op& o) {  // a + b -> y; n: how many
    runs(o.n[0], [&](int64_t i, int64_t m) {
        put(at<float>(o, 2) + i, get(at<const float>(o, 0) + i, m) + get(at<const float>(o, 1) + i, m), m);
    });
}

// raw [B, T, C], taps [W, C], carried [slots, W - 1, C], lengths [B], slots [B] -> y [B, T, C]; n: B, T, C, W.
// The carried inputs move on by a row's length.
void short_conv(const Op& o) {
    int64_t rows = o.n[0], tokens = o.n[1], c = o.n[2], width = o.n[3];
    const float* taps = at<const float>(o, 1);
    for (int64_t b = 0; b < rows; b++) {
        float* kept = at<float>(o, 2) + at<const int64_t>(o, 4)[b] * (width - 1) * c;
        for (int64_t t = 0; t < at<const int64_t>(o, 3)[b]; t++) {
            const float* raw = at<const float>(o, 0) + (b * tokens + t) * c;
            float* y = at<float>(o, 5) + (b * tokens + t) * c;
            runs(c, [&](int64_t i, int64_t m) {
                vf fresh = get(raw + i, m), sum = width > 1 ? get(kept + i, m) * get(taps + i, m) : vf{};
                for (int64_t j = 1; j + 1 < width; j++) {
                    vf older = get(kept + j * c + i, m);
                    sum = fma(older, get(taps + j * c + i, m), sum);
                    put(kept + (j - 1) * c + i, older, m);
                }
                if (width > 1) put(kept + (width - 2) * c + i, fresh, m);
                sum = width > 1 ? fma(fresh, get(taps + (width - 1) * c + i, m), sum) : fresh * get(taps + i, m);
                put(y + i, silu(sum), m);
            });
        }
    }
}

// A token's latent and keys and values into their cells at *position: kv [R + P] with the latent normed, expanded
// [H, N + V]; n: R, P, H, N, V; latent [., R + P], keys [., H, N + P], values [., H, V] of a slot.
void append(const Op& o) {
    int64_t rank = o.n[0], pe = o.n[1], heads = o.n[2], nope = o.n[3], value = o.n[4];
    int64_t position = *at<const int64_t>(o, 0);
    const float *kv = at<const float>(o, 1), *expanded = at<const float>(o, 2);
    std::memcpy(at<float>(o, 3) + position * (rank + pe), kv, (rank + pe) * sizeof(float));
    for (int64_t h = 0; h < heads; h++) {
        float* key = at<float>(o, 4) + (position * heads + h) * (nope + pe);
        const float* from = expanded + h * (nope + value);
        std::memcpy(key, from, nope * sizeof(float));
        std::memcpy(key + nope, kv + rank, pe * sizeof(float));
        std::memcpy(at<float>(o, 5) + (position * heads + h) * value, from + nope, value * sizeof(float));
    }
}

// logits [N, E], bias [E] -> ids [N, k], weights [N, k]; n: N, E, k, renormalize, scale before; f: factor.
// The largest biased scores first, equal ones by increasing id; weights are of the scores without bias.
void route(const Op& o) {
    int64_t experts = o.n[1], k = o.n[2];
    float factor = static_cast<float>(o.f[0]);
    std::vector<float> score(experts + LANES), choice(experts + LANES);
    for (int64_t r = 0; r < o.n[0]; r++) {
        const float* logits = at<const float>(o, 0) + r * experts;
        runs(experts, [&](int64_t i, int64_t m) {
            vf s = sigmoid(get(logits + i, m));
            put(&score[i], s, m);
            put(&choice[i], s + get(at<const float>(o, 1) + i, m), m);
        });
        int64_t* ids = at<int64_t>(o, 2) + r * k;
        float *weights = at<float>(o, 3) + r * k, sum = 0;
        for (int64_t j = 0; j < k; j++) {
            int64_t best = -1;
            for (int64_t e = 0; e < experts; e++) {
                bool taken = false;
                for (int64_t i = 0; i < j; i++) taken |= ids[i] == e;
                // as a sort has them: what is not a number before all that are
                float here = choice[e], most = best < 0 ? here : choice[best];
                if (!taken && (best < 0 || here > most || (here != here && most == most))) best = e;
            }
            ids[j] = best;
            weights[j] = score[best];
            sum = j ? sum + score[best] : score[best];
        }
        sum += 1e-20f;
        for (int64_t j = 0; j < k; j++) {
            if (!o.n[3]) weights[j] *= factor;
            else if (o.n[4]) weights[j] = weights[j] * factor / sum;
            else weights[j] = weights[j] / sum * factor;
        }
    }
}

// The largest logit's token, the lowest id of equal ones, into the token of the next step; n: V.
void finish(const Op& o) {  // logits -> token, position + 1, taken[count], count + 1; n: V, how many are remembered
    const float* logits = at<const float>(o, 0);
    int64_t best = 0;
    for (int64_t i = 1; i < o.n[0]; i++)
        if (logits[i] > logits[best]) best = i;
    int64_t* count = at<int64_t>(o, 4);
    *at<int64_t>(o, 1) = best;
    ++*at<int64_t>(o, 2);
    at<int64_t>(o, 3)[(*count)++ % o.n[1]] = best;
}

}  // namespace
