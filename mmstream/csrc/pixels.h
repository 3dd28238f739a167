/* Coefficients to samples of 1/2 or 1/4 of a block's side, and samples to RGB, in the integers that
   libjpeg calculates in. Included by reduced.c alone.

   Right shifts of negative numbers are arithmetic, as with every compiler that is meant here. */

#ifndef PIXELS_H
#define PIXELS_H

#include <stddef.h>
#include <stdint.h>
#include <string.h>
#ifdef __SSE2__
#include <emmintrin.h>
#endif

/* No picture of 8 bits has coefficients beyond 1024 and half a quantum. Within this, sums fit into
   16 bits after the first pass and into 32 in the second. */
#define LARGEST 1400

/* Samples by value + 512. Further out libjpeg's builds differ, so that counts as bad. */
static uint8_t SAMPLES[1024];

static void fill_samples(void)
{
    for (int i = 0; i < 1024; i++)
        SAMPLES[i] = (uint8_t)(i < 384 ? 0 : i > 639 ? 255 : i - 384);
}

static inline uint8_t to_sample(int32_t value, unsigned *bad)
{
    unsigned index = (unsigned)value + 512;
    *bad |= index;
    return SAMPLES[index & 1023];
}

/* Columns of a block lie in the order 0 4 2 6 1 3 5 7, so that pairs of them are neighbours. */
typedef struct {
    int16_t quanta[56], limits[56]; /* by slot; how large a coefficient may be */
} Scales;

/* Both transforms return whether libjpeg should judge. */
#ifdef __SSE2__

typedef __m128i Eight; /* integers of 16 bits, or four of 32 */

static inline Eight pair(int first, int second)
{
    return _mm_set1_epi32((int)((uint32_t)(uint16_t)first | (uint32_t)second << 16));
}

static inline Eight scale(const int16_t *block, const Scales *scales, int row, Eight *over)
{
    Eight value = _mm_loadu_si128((const Eight *)(block + 8 * row));
    Eight limit = _mm_loadu_si128((const Eight *)(scales->limits + 8 * row));
    Eight quanta = _mm_loadu_si128((const Eight *)(scales->quanta + 8 * row));
    Eight beyond = _mm_subs_epu16(_mm_add_epi16(value, limit), _mm_add_epi16(limit, limit));
    *over = _mm_or_si128(*over, beyond);
    return _mm_mullo_epi16(value, quanta);
}

static inline int is_zero(Eight value)
{
    return _mm_movemask_epi8(_mm_cmpeq_epi8(value, _mm_setzero_si128())) == 0xffff;
}

/* Not zero where a value is none of SAMPLES. */
static inline Eight outside(Eight value)
{
    return _mm_srli_epi32(_mm_add_epi32(value, _mm_set1_epi32(512)), 10);
}

static inline void even_odd_2(Eight z0, Eight z13, Eight z57, Eight *first, Eight *second)
{
    Eight even = _mm_add_epi32(_mm_srai_epi32(z0, 1), _mm_set1_epi32(1 << 12));
    Eight odd = _mm_add_epi32(
        _mm_madd_epi16(z13, pair(29692, -10426)), _mm_madd_epi16(z57, pair(6967, -5906)));
    *first = _mm_srai_epi32(_mm_add_epi32(even, odd), 13);
    *second = _mm_srai_epi32(_mm_sub_epi32(even, odd), 13);
}

/* A block's rows 0 1 3 5 7 to 2x2 samples. */
static inline int transform_2(
    const int16_t *block, const Scales *scales, uint8_t *out, size_t stride)
{
    const Eight zero = _mm_setzero_si128();
    Eight over = zero, low[2], high[2];
    Eight z0 = scale(block, scales, 0, &over), z1 = scale(block, scales, 1, &over);
    Eight z3 = scale(block, scales, 2, &over), z5 = scale(block, scales, 3, &over);
    Eight z7 = scale(block, scales, 4, &over);
    even_odd_2(_mm_unpacklo_epi16(zero, z0), _mm_unpacklo_epi16(z1, z3),
        _mm_unpacklo_epi16(z5, z7), &low[0], &low[1]);
    even_odd_2(_mm_unpackhi_epi16(zero, z0), _mm_unpackhi_epi16(z1, z3),
        _mm_unpackhi_epi16(z5, z7), &high[0], &high[1]);
    /* of both rows: column 0, and the pairs 1 3 and 5 7 */
    Eight top = _mm_packs_epi32(low[0], high[0]), bottom = _mm_packs_epi32(low[1], high[1]);
    Eight even = _mm_srai_epi32(_mm_slli_epi32(_mm_unpacklo_epi32(top, bottom), 16), 1);
    Eight pairs = _mm_unpackhi_epi32(top, bottom); /* 13 13 57 57 */
    Eight odd = _mm_madd_epi16(
        pairs, _mm_unpacklo_epi64(pair(29692, -10426), pair(6967, -5906)));
    odd = _mm_add_epi32(odd, _mm_srli_si128(odd, 8));
    even = _mm_add_epi32(even, _mm_set1_epi32(1 << 19));
    Eight both = _mm_unpacklo_epi32(_mm_add_epi32(even, odd), _mm_sub_epi32(even, odd));
    both = _mm_srai_epi32(both, 20);
    over = _mm_or_si128(over, outside(both));
    both = _mm_add_epi16(_mm_packs_epi32(both, both), _mm_set1_epi16(128));
    uint32_t samples = (uint32_t)_mm_cvtsi128_si32(_mm_packus_epi16(both, both));
    memcpy(out, &samples, 2);
    samples >>= 16;
    memcpy(out + stride, &samples, 2);
    return !is_zero(over);
}

static inline void even_odd_4(Eight z0, Eight z26, Eight z13, Eight z57, int shift, Eight out[4])
{
    Eight first = _mm_add_epi32(_mm_srai_epi32(z0, 2), _mm_set1_epi32(1 << (shift - 1)));
    Eight even = _mm_madd_epi16(z26, pair(15137, -6270));
    Eight outer = _mm_add_epi32(
        _mm_madd_epi16(z13, pair(20995, 7373)), _mm_madd_epi16(z57, pair(-4926, -4176)));
    Eight inner = _mm_add_epi32(
        _mm_madd_epi16(z13, pair(8697, -17799)), _mm_madd_epi16(z57, pair(11893, -1730)));
    Eight sum = _mm_add_epi32(first, even), difference = _mm_sub_epi32(first, even);
    out[0] = _mm_srai_epi32(_mm_add_epi32(sum, outer), shift);
    out[1] = _mm_srai_epi32(_mm_add_epi32(difference, inner), shift);
    out[2] = _mm_srai_epi32(_mm_sub_epi32(difference, inner), shift);
    out[3] = _mm_srai_epi32(_mm_sub_epi32(sum, outer), shift);
}

/* A block's rows 0 1 2 3 5 6 7 to 4x4 samples. */
static inline int transform_4(
    const int16_t *block, const Scales *scales, uint8_t *out, size_t stride)
{
    const Eight zero = _mm_setzero_si128();
    Eight over = zero, low[4], high[4];
    Eight z0 = scale(block, scales, 0, &over), z1 = scale(block, scales, 1, &over);
    Eight z2 = scale(block, scales, 2, &over), z3 = scale(block, scales, 3, &over);
    Eight z5 = scale(block, scales, 4, &over), z6 = scale(block, scales, 5, &over);
    Eight z7 = scale(block, scales, 6, &over);
    even_odd_4(_mm_unpacklo_epi16(zero, z0), _mm_unpacklo_epi16(z2, z6), _mm_unpacklo_epi16(z1, z3),
        _mm_unpacklo_epi16(z5, z7), 12, low);
    even_odd_4(_mm_unpackhi_epi16(zero, z0), _mm_unpackhi_epi16(z2, z6), _mm_unpackhi_epi16(z1, z3),
        _mm_unpackhi_epi16(z5, z7), 12, high);
    for (int y = 0; y < 4; y++) /* rows of pairs 04 26 13 57 */
        low[y] = _mm_packs_epi32(low[y], high[y]);
    Eight a = _mm_unpacklo_epi32(low[0], low[1]), b = _mm_unpacklo_epi32(low[2], low[3]);
    Eight c = _mm_unpackhi_epi32(low[0], low[1]), d = _mm_unpackhi_epi32(low[2], low[3]);
    even_odd_4(_mm_slli_epi32(_mm_unpacklo_epi64(a, b), 16), _mm_unpackhi_epi64(a, b),
        _mm_unpacklo_epi64(c, d), _mm_unpackhi_epi64(c, d), 19, high);
    for (int x = 0; x < 4; x++)
        over = _mm_or_si128(over, outside(high[x]));
    a = _mm_packs_epi32(high[0], high[2]), b = _mm_packs_epi32(high[1], high[3]);
    c = _mm_unpacklo_epi16(a, b), d = _mm_unpackhi_epi16(a, b);
    a = _mm_add_epi16(_mm_unpacklo_epi32(c, d), _mm_set1_epi16(128));
    b = _mm_add_epi16(_mm_unpackhi_epi32(c, d), _mm_set1_epi16(128));
    uint32_t samples[4];
    _mm_storeu_si128((Eight *)samples, _mm_packus_epi16(a, b));
    for (int y = 0; y < 4; y++)
        memcpy(out + (size_t)y * stride, &samples[y], 4);
    return !is_zero(over);
}

#else

/* Returns whether a coefficient is too large. */
static inline int dequantize(const int16_t *block, const Scales *scales, int count, int16_t *z)
{
    int16_t room = 0;
    for (int i = 0; i < count; i++) {
        int16_t size = (int16_t)(block[i] < 0 ? -block[i] : block[i]);
        room |= (int16_t)(scales->limits[i] - size);
        z[i] = (int16_t)(block[i] * scales->quanta[i]);
    }
    return room < 0;
}

static inline int transform_2(
    const int16_t *block, const Scales *scales, uint8_t *out, size_t stride)
{
    int16_t z[40], rows[2][8];
    unsigned bad = 0;
    if (dequantize(block, scales, 40, z))
        return 1;
    for (int i = 0; i < 8; i++) {
        int32_t even = z[i] * 32768 + (1 << 12);
        int32_t odd = z[i + 8] * 29692 - z[i + 16] * 10426 + z[i + 24] * 6967 - z[i + 32] * 5906;
        rows[0][i] = (int16_t)((even + odd) >> 13);
        rows[1][i] = (int16_t)((even - odd) >> 13);
    }
    for (int y = 0; y < 2; y++, out += stride) {
        const int16_t *r = rows[y];
        int32_t even = r[0] * 32768 + (1 << 19);
        int32_t odd = r[4] * 29692 - r[5] * 10426 + r[6] * 6967 - r[7] * 5906;
        out[0] = to_sample((even + odd) >> 20, &bad);
        out[1] = to_sample((even - odd) >> 20, &bad);
    }
    return bad >> 10 != 0;
}

static inline int transform_4(
    const int16_t *block, const Scales *scales, uint8_t *out, size_t stride)
{
    int16_t z[56], rows[4][8];
    unsigned bad = 0;
    if (dequantize(block, scales, 56, z))
        return 1;
    for (int i = 0; i < 8; i++) {
        int32_t first = z[i] * 16384 + (1 << 11), even = z[i + 16] * 15137 - z[i + 40] * 6270;
        int32_t outer = z[i + 8] * 20995 + z[i + 24] * 7373 - z[i + 32] * 4926 - z[i + 48] * 4176;
        int32_t inner = z[i + 8] * 8697 - z[i + 24] * 17799 + z[i + 32] * 11893 - z[i + 48] * 1730;
        rows[0][i] = (int16_t)((first + even + outer) >> 12);
        rows[1][i] = (int16_t)((first - even + inner) >> 12);
        rows[2][i] = (int16_t)((first - even - inner) >> 12);
        rows[3][i] = (int16_t)((first + even - outer) >> 12);
    }
    for (int y = 0; y < 4; y++, out += stride) {
        const int16_t *r = rows[y];
        int32_t first = r[0] * 16384 + (1 << 18), even = r[2] * 15137 - r[3] * 6270;
        int32_t outer = r[4] * 20995 + r[5] * 7373 - r[6] * 4926 - r[7] * 4176;
        int32_t inner = r[4] * 8697 - r[5] * 17799 + r[6] * 11893 - r[7] * 1730;
        out[0] = to_sample((first + even + outer) >> 19, &bad);
        out[1] = to_sample((first - even + inner) >> 19, &bad);
        out[2] = to_sample((first - even - inner) >> 19, &bad);
        out[3] = to_sample((first + even - outer) >> 19, &bad);
    }
    return bad >> 10 != 0;
}

#endif

#define STRIP 64 /* samples that are converted at once: rows are read up to here past their end */

static void to_rgb(const uint8_t *restrict luma, const uint8_t *restrict blue,
    const uint8_t *restrict red, uint8_t *restrict rgb, int width)
{
    uint8_t planes[3][STRIP];
    for (; width > 0; width -= STRIP, luma += STRIP, blue += STRIP, red += STRIP) {
        int count = width < STRIP ? width : STRIP;
        for (int x = 0; x < STRIP; x++) {
            int16_t y = luma[x], cb = (int16_t)(blue[x] - 128), cr = (int16_t)(red[x] - 128);
            int16_t r = (int16_t)(y + cr + (int16_t)((26345 * cr + 32768) >> 16));
            int16_t g = (int16_t)(y - cr + (int16_t)((18734 * cr - 22554 * cb + 32768) >> 16));
            int16_t b = (int16_t)(y + 2 * cb + (int16_t)((-14942 * cb + 32768) >> 16));
            r = r < 0 ? 0 : r, g = g < 0 ? 0 : g, b = b < 0 ? 0 : b;
            planes[0][x] = (uint8_t)(r > 255 ? 255 : r);
            planes[1][x] = (uint8_t)(g > 255 ? 255 : g);
            planes[2][x] = (uint8_t)(b > 255 ? 255 : b);
        }
        for (int x = 0; x < count; x++, rgb += 3)
            rgb[0] = planes[0][x], rgb[1] = planes[1][x], rgb[2] = planes[2][x];
    }
}

/* Chroma to twice its width: repeated, or three quarters of the nearer and one of the farther. */
static void widen(const uint8_t *restrict in, int count, uint8_t *restrict out, int smooth)
{
    for (int x = 0; x < count; x++) {
        int left = in[x ? x - 1 : 0], right = in[x + 1 < count ? x + 1 : x];
        out[2 * x] = (uint8_t)(smooth ? (3 * in[x] + left + 1) >> 2 : in[x]);
        out[2 * x + 1] = (uint8_t)(smooth ? (3 * in[x] + right + 2) >> 2 : in[x]);
    }
}

#endif
