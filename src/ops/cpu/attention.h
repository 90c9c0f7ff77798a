// Attention over cache rows, and the indexer's scores. All sums run in an order that depends on the
// token alone.
#pragma once

#include <cstdint>

namespace penstock::cpu {

// Tokens of an index page; its keys lie transposed, [dim, 64], so that 64 scores need no sum across
// lanes.
inline constexpr std::int64_t kIndexPageTokens = 64;

// One token's heads against its picks. q [heads, ldq]: (q_lat | rotated q_pe), `dim` floats; rows
// [picks] point at cache rows (c_kv | k_pe). out [heads, ldo], `latent` floats:
//   out_h = sum_t softmax_t(scale * q_h . row_t) row_t[0, latent)
// `latent` is a multiple of 64; logits is scratch of attend_scratch(picks) floats. picks >= 1.
void attend(const float* q, std::int64_t ldq, std::int64_t heads, const float* const* rows,
            std::int64_t picks, std::int64_t dim, std::int64_t latent, float scale, float* logits,
            float* out, std::int64_t ldo);
std::int64_t attend_scratch(std::int64_t picks);

// scores[t] = sum_h weights[h] * max(0, q_h . key_t), heads in order, for the 64 tokens of a page.
// q [heads, dim], page [dim, 64]. Slots without a token give values that mean nothing.
void index_scores(const float* q, const float* weights, std::int64_t heads, std::int64_t dim,
                  const float* page, float* scores);

// The min(k, count) greatest scores' positions, ascending; equal scores go to the smaller position,
// -0 equals +0, NaN is less than everything. keys is scratch [count]. Returns how many.
std::int64_t top_k(const float* scores, std::int64_t count, std::int64_t k, std::uint64_t* keys,
                   std::int32_t* picks);

}  // namespace penstock::cpu
