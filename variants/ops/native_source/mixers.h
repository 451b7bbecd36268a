// What mixes tokens: the delta rule and attention.

#pragma once
#include <vector>

#include "lanes.h"
#include "op.h"

namespace {

struct Delta {
    const float *q, *k, *v, *f;
    float beta;
    const float *rate, *bias;
    float *state, *o;
    int64_t key, value;
    float scale, eps;
};

// One token of one head: gate, L2 norms, decay, the correction by the error of the state's own prediction, the read.
void delta_head(const Delta& d, std::vector<float>& scratch) {
    scratch.resize(3 * (d.key + LANES));
    float *q = scratch.data(), *k = q + d.key + LANES, *decay = k + d.key + LANES;
    float q_norm = std::sqrt(dot(d.q, d.q, d.key) + d.eps), k_norm = std::sqrt(dot(d.k, d.k, d.key) + d.eps);
    float strength = sigmoid(all(d.beta))[0];
    runs(d.key, [&](int64_t i, int64_t m) {
        put(q + i, get(d.q + i, m) / q_norm * d.scale, m);
        put(k + i, get(d.k + i, m) / k_norm, m);
        put(decay + i, exponential(*d.rate * softplus(get(d.f + i, m) + get(d.bias + i, m))), m);
    });
    constexpr int64_t WIDE = 4 * LANES;  // columns of the state that go together
    for (int64_t from = 0; from < d.value; from += WIDE) {
        int64_t columns = d.value - from < WIDE ? d.value - from : WIDE, parts = (columns + LANES - 1) / LANES;
        vf seen[4] = {}, read[4] = {}, error[4] = {};
        for (int64_t i = 0; i < d.key; i++) {
            const float* row = d.state + i * d.value + from;
            for (int64_t j = 0; j < parts; j++) {
                int64_t m = columns - j * LANES < LANES ? columns - j * LANES : LANES;
                seen[j] = fma(get(row + j * LANES, m) * decay[i], all(k[i]), seen[j]);
            }
        }
        for (int64_t j = 0; j < parts; j++) {
            int64_t m = columns - j * LANES < LANES ? columns - j * LANES : LANES;
            error[j] = (get(d.v + from + j * LANES, m) - seen[j]) * strength;
        }
        for (int64_t i = 0; i < d.key; i++) {
            float* row = d.state + i * d.value + from;
            for (int64_t j = 0; j < parts; j++) {
                int64_t m = columns - j * LANES < LANES ? columns - j * LANES : LANES;
                vf now = fma(all(k[i]), error[j], get(row + j * LANES, m) * decay[i]);
                put(row + j * LANES, now, m);
                read[j] = fma(now, all(q[i]), read[j]);
            }
        }
        for (int64_t j = 0; j < parts; j++) {
            int64_t m = columns - j * LANES < LANES ? columns - j * LANES : LANES;
            put(d.o + from + j * LANES, read[j], m);
        }
    }
}

// q, k [B, T, H, K] and v [B, T, H, V] (tokens n[6], n[7], n[8] apart), f [B, T, H, K], beta [B, T, H], rate [H],
// bias [H, K], state [slots, H, K, V], lengths, slots -> o [B, T, H, V]; n: B, T, H, K, V, -; f: scale, eps.
void delta_rule(const Op& o) {
    int64_t rows = o.n[0], tokens = o.n[1], heads = o.n[2], key = o.n[3], value = o.n[4];
    std::vector<float> scratch;
    for (int64_t b = 0; b < rows; b++)
        for (int64_t t = 0; t < at<const int64_t>(o, 8)[b]; t++)
            for (int64_t h = 0; h < heads; h++) {
                int64_t token = b * tokens + t, slot = at<const int64_t>(o, 9)[b];
                delta_head({at<const float>(o, 0) + token * o.n[6] + h * key,
                            at<const float>(o, 1) + token * o.n[7] + h * key,
                            at<const float>(o, 2) + token * o.n[8] + h * value,
                            at<const float>(o, 3) + (token * heads + h) * key, at<const float>(o, 4)[token * heads + h],
                            at<const float>(o, 5) + h, at<const float>(o, 6) + h * key,
                            at<float>(o, 7) + (slot * heads + h) * key * value,
                            at<float>(o, 10) + (token * heads + h) * value, key, value, static_cast<float>(o.f[0]),
                            static_cast<float>(o.f[1])}, scratch);
            }
}

// One query of one head over the first `count` keys: all scores, one softmax, one weighted sum.
void attend(const float* q, const float* k, int64_t k_row, const float* v, int64_t v_row, int64_t count, int64_t width,
            int64_t value, float scale, float* o, std::vector<float>& probs) {
    probs.resize(count);
    float most = -INFINITY;
    for (int64_t i = 0; i < count; i++) {
        probs[i] = dot(q, k + i * k_row, width) * scale;
        most = probs[i] > most || probs[i] != probs[i] ? probs[i] : most;
    }
    vf sum{};
    runs(count, [&](int64_t i, int64_t m) {
        vf e = exponential(get(&probs[i], m) - most);
        put(&probs[i], e, m);
        sum += get(&probs[i], m);
    });
    float whole = total(sum);
    runs(count, [&](int64_t i, int64_t m) { put(&probs[i], get(&probs[i], m) / whole, m); });
    constexpr int64_t WIDE = 8 * LANES;
    for (int64_t from = 0; from < value; from += WIDE) {
        int64_t columns = value - from < WIDE ? value - from : WIDE, parts = (columns + LANES - 1) / LANES;
        vf out[8] = {};
        for (int64_t i = 0; i < count; i++)
            for (int64_t j = 0; j < parts; j++) {
                int64_t m = columns - j * LANES < LANES ? columns - j * LANES : LANES;
                out[j] = fma(get(v + i * v_row + from + j * LANES, m), all(probs[i]), out[j]);
            }
        for (int64_t j = 0; j < parts; j++) {
            int64_t m = columns - j * LANES < LANES ? columns - j * LANES : LANES;
            put(o + from + j * LANES, out[j], m);
        }
    }
}

// q [B, T, H, D], k [B, L, H, D], v [B, L, H, V], positions [B, T] -> o [B, T, H, V]; n: B, T, H, D, V, L; f: scale.
void attention(const Op& o) {
    int64_t rows = o.n[0], tokens = o.n[1], heads = o.n[2], width = o.n[3], value = o.n[4], keys = o.n[5];
    std::vector<float> probs;
    for (int64_t b = 0; b < rows; b++)
        for (int64_t t = 0; t < tokens; t++) {
            int64_t token = b * tokens + t, seen = at<const int64_t>(o, 3)[token] + 1;
            for (int64_t h = 0; h < heads; h++)
                attend(at<const float>(o, 0) + (token * heads + h) * width,
                       at<const float>(o, 1) + (b * keys * heads + h) * width, heads * width,
                       at<const float>(o, 2) + (b * keys * heads + h) * value, heads * value, seen < keys ? seen : keys,
                       width, value, static_cast<float>(o.f[0]), at<float>(o, 4) + (token * heads + h) * value, probs);
        }
}

}  // namespace
