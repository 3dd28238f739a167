/* DCT coefficients to samples, and samples to RGB.

   Last stage of the decoder. It calculates with the same integers as libjpeg-turbo (jidctred.c,
   jdcolor.c, jdsample.c), so the results are equal bit for bit. A block becomes 2x2 or 4x4 samples.
   There is SSE2 code and portable code, with the same results. Included by decode.h only.

   The code needs arithmetic right shifts of negative numbers. GCC, Clang and MSVC have them. */

#ifndef PIXELS_H
#define PIXELS_H

#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include "entropy.h"
#ifdef __SSE2__
#include <emmintrin.h>
#endif

/* The largest coefficient, after its multiplication, that a transform takes. An encoder of 8-bit
   pictures writes none beyond 1024 plus half a quantization step. Up to this limit sums fit into 16
   bits after the first pass, and into 32 bits in the second. */
#define LARGEST 1400

/* Samples, clamped, by value + 512. The value is without the +128 that centers samples. Builds of
   libjpeg differ for values outside the table, so those are left to libjpeg. */
static uint8_t SAMPLES[1024];

static void fill_samples(void)
{
    for (int i = 0; i < 1024; i++)
        SAMPLES[i] = (uint8_t)(i < 384 ? 0 : i > 639 ? 255 : i - 384);
}

/* Adds the index to `range`, which is above 1023 if any value was outside the table. */
static inline uint8_t to_sample(int32_t value, unsigned *range)
{
    unsigned index = (unsigned)value + 512;
    *range |= index;
    return SAMPLES[index & 1023];
}

/* What coefficients are multiplied by, and how large they may be before that. Both are by slot. A
   slot is 8 x the index of the row among those that the transform reads + the index of the column
   in the order 0 4 2 6 1 3 5 7. So columns that are calculated together are neighbors. A transform
   to 8x8 samples has all rows and columns, in their usual order.

   Example: a transform to 2x2 samples reads rows 0 1 3 5 7. Row 3, column 1 has slot 8 x 2 + 4. */
typedef struct {
    int16_t factors[BLOCK], limits[BLOCK];
} Dequantizer;

/* ---- transforms

   transform_2(), transform_4() and transform_8() write 2x2, 4x4 and 8x8 samples of one block. They
   do it in two passes, over the columns and then over the rows. They return 0, or 1 for a block that
   is left to libjpeg: a coefficient above its limit, or a value outside SAMPLES. transform_8() also
   leaves values beyond 8192 after the first pass, which no encoder of 8-bit pictures causes. */
#ifdef __SSE2__

typedef __m128i Vector; /* 8 integers of 16 bits, or 4 of 32 */

/* Four times a pair of 16-bit constants, for _mm_madd_epi16: a x first + b x second. */
static inline Vector pair(int first, int second)
{
    return _mm_set1_epi32((int)((uint32_t)(uint16_t)first | (uint32_t)second << 16));
}

/* Returns a row of multiplied coefficients. `over` becomes non-zero if one is above its limit. */
static inline Vector dequantize(
    const int16_t *block, const Dequantizer *dequantizer, int row, Vector *over)
{
    Vector value = _mm_loadu_si128((const Vector *)(block + 8 * row));
    Vector limit = _mm_loadu_si128((const Vector *)(dequantizer->limits + 8 * row));
    Vector factors = _mm_loadu_si128((const Vector *)(dequantizer->factors + 8 * row));
    /* value + limit is 0 to 2 x limit without a sign; the saturated difference is then 0 */
    Vector beyond = _mm_subs_epu16(_mm_add_epi16(value, limit), _mm_add_epi16(limit, limit));
    *over = _mm_or_si128(*over, beyond);
    return _mm_mullo_epi16(value, factors);
}

static inline int is_zero(Vector value)
{
    return _mm_movemask_epi8(_mm_cmpeq_epi8(value, _mm_setzero_si128())) == 0xffff;
}

/* Non-zero where a value is outside SAMPLES. */
static inline Vector outside(Vector value)
{
    return _mm_srli_epi32(_mm_add_epi32(value, _mm_set1_epi32(512)), 10);
}

static inline void even_odd_2(Vector z0, Vector z13, Vector z57, Vector *first, Vector *second)
{
    Vector even = _mm_add_epi32(_mm_srai_epi32(z0, 1), _mm_set1_epi32(1 << 12));
    Vector odd = _mm_add_epi32(
        _mm_madd_epi16(z13, pair(29692, -10426)), _mm_madd_epi16(z57, pair(6967, -5906)));
    *first = _mm_srai_epi32(_mm_add_epi32(even, odd), 13);
    *second = _mm_srai_epi32(_mm_sub_epi32(even, odd), 13);
}

/* Reads rows 0 1 3 5 7 of a block. */
static inline int transform_2(
    const int16_t *block, const Dequantizer *dequantizer, uint8_t *out, size_t stride)
{
    const Vector zero = _mm_setzero_si128();
    Vector over = zero, low[2], high[2];
    Vector z0 = dequantize(block, dequantizer, 0, &over);
    Vector z1 = dequantize(block, dequantizer, 1, &over);
    Vector z3 = dequantize(block, dequantizer, 2, &over);
    Vector z5 = dequantize(block, dequantizer, 3, &over);
    Vector z7 = dequantize(block, dequantizer, 4, &over);
    even_odd_2(_mm_unpacklo_epi16(zero, z0), _mm_unpacklo_epi16(z1, z3),
        _mm_unpacklo_epi16(z5, z7), &low[0], &low[1]);
    even_odd_2(_mm_unpackhi_epi16(zero, z0), _mm_unpackhi_epi16(z1, z3),
        _mm_unpackhi_epi16(z5, z7), &high[0], &high[1]);
    /* of both rows: column 0, then the column pairs 1 3 and 5 7 */
    Vector top = _mm_packs_epi32(low[0], high[0]), bottom = _mm_packs_epi32(low[1], high[1]);
    Vector even = _mm_srai_epi32(_mm_slli_epi32(_mm_unpacklo_epi32(top, bottom), 16), 1);
    Vector pairs = _mm_unpackhi_epi32(top, bottom); /* 13 13 57 57 */
    Vector odd = _mm_madd_epi16(
        pairs, _mm_unpacklo_epi64(pair(29692, -10426), pair(6967, -5906)));
    odd = _mm_add_epi32(odd, _mm_srli_si128(odd, 8));
    even = _mm_add_epi32(even, _mm_set1_epi32(1 << 19));
    Vector both = _mm_unpacklo_epi32(_mm_add_epi32(even, odd), _mm_sub_epi32(even, odd));
    both = _mm_srai_epi32(both, 20);
    over = _mm_or_si128(over, outside(both));
    both = _mm_add_epi16(_mm_packs_epi32(both, both), _mm_set1_epi16(128));
    uint32_t samples = (uint32_t)_mm_cvtsi128_si32(_mm_packus_epi16(both, both));
    memcpy(out, &samples, 2);
    samples >>= 16;
    memcpy(out + stride, &samples, 2);
    return !is_zero(over);
}

static inline void even_odd_4(
    Vector z0, Vector z26, Vector z13, Vector z57, int shift, Vector out[4])
{
    Vector first = _mm_add_epi32(_mm_srai_epi32(z0, 2), _mm_set1_epi32(1 << (shift - 1)));
    Vector even = _mm_madd_epi16(z26, pair(15137, -6270));
    Vector outer = _mm_add_epi32(
        _mm_madd_epi16(z13, pair(20995, 7373)), _mm_madd_epi16(z57, pair(-4926, -4176)));
    Vector inner = _mm_add_epi32(
        _mm_madd_epi16(z13, pair(8697, -17799)), _mm_madd_epi16(z57, pair(11893, -1730)));
    Vector sum = _mm_add_epi32(first, even), difference = _mm_sub_epi32(first, even);
    out[0] = _mm_srai_epi32(_mm_add_epi32(sum, outer), shift);
    out[1] = _mm_srai_epi32(_mm_add_epi32(difference, inner), shift);
    out[2] = _mm_srai_epi32(_mm_sub_epi32(difference, inner), shift);
    out[3] = _mm_srai_epi32(_mm_sub_epi32(sum, outer), shift);
}

/* Reads rows 0 1 2 3 5 6 7 of a block. */
static inline int transform_4(
    const int16_t *block, const Dequantizer *dequantizer, uint8_t *out, size_t stride)
{
    const Vector zero = _mm_setzero_si128();
    Vector over = zero, low[4], high[4];
    Vector z0 = dequantize(block, dequantizer, 0, &over);
    Vector z1 = dequantize(block, dequantizer, 1, &over);
    Vector z2 = dequantize(block, dequantizer, 2, &over);
    Vector z3 = dequantize(block, dequantizer, 3, &over);
    Vector z5 = dequantize(block, dequantizer, 4, &over);
    Vector z6 = dequantize(block, dequantizer, 5, &over);
    Vector z7 = dequantize(block, dequantizer, 6, &over);
    even_odd_4(_mm_unpacklo_epi16(zero, z0), _mm_unpacklo_epi16(z2, z6), _mm_unpacklo_epi16(z1, z3),
        _mm_unpacklo_epi16(z5, z7), 12, low);
    even_odd_4(_mm_unpackhi_epi16(zero, z0), _mm_unpackhi_epi16(z2, z6), _mm_unpackhi_epi16(z1, z3),
        _mm_unpackhi_epi16(z5, z7), 12, high);
    for (int y = 0; y < 4; y++) /* each row: the column pairs 0 4, 2 6, 1 3, 5 7 */
        low[y] = _mm_packs_epi32(low[y], high[y]);
    Vector a = _mm_unpacklo_epi32(low[0], low[1]), b = _mm_unpacklo_epi32(low[2], low[3]);
    Vector c = _mm_unpackhi_epi32(low[0], low[1]), d = _mm_unpackhi_epi32(low[2], low[3]);
    even_odd_4(_mm_slli_epi32(_mm_unpacklo_epi64(a, b), 16), _mm_unpackhi_epi64(a, b),
        _mm_unpacklo_epi64(c, d), _mm_unpackhi_epi64(c, d), 19, high);
    for (int x = 0; x < 4; x++)
        over = _mm_or_si128(over, outside(high[x]));
    a = _mm_packs_epi32(high[0], high[2]), b = _mm_packs_epi32(high[1], high[3]);
    c = _mm_unpacklo_epi16(a, b), d = _mm_unpackhi_epi16(a, b);
    a = _mm_add_epi16(_mm_unpacklo_epi32(c, d), _mm_set1_epi16(128));
    b = _mm_add_epi16(_mm_unpackhi_epi32(c, d), _mm_set1_epi16(128));
    uint32_t samples[4];
    _mm_storeu_si128((Vector *)samples, _mm_packus_epi16(a, b));
    for (int y = 0; y < 4; y++)
        memcpy(out + (size_t)y * stride, &samples[y], 4);
    return !is_zero(over);
}

/* One pass of transform_8() over 4 columns. It takes its rows in pairs. */
static inline void even_odd_8(
    Vector z04, Vector z26, Vector z13, Vector z57, int shift, Vector out[8])
{
    static const int16_t ODD[4][4] = {{11363, 9633, 6437, 2260}, {9633, -2259, -11362, -6436},
        {6437, -11362, 2261, 9633}, {2260, -6436, 9633, -11363}};
    const Vector half = _mm_set1_epi32(1 << (shift - 1));
    Vector sum = _mm_add_epi32(_mm_madd_epi16(z04, pair(8192, 8192)), half);
    Vector difference = _mm_add_epi32(_mm_madd_epi16(z04, pair(8192, -8192)), half);
    Vector outer = _mm_madd_epi16(z26, pair(10703, 4433));
    Vector inner = _mm_madd_epi16(z26, pair(4433, -10704));
    const Vector even[4] = {_mm_add_epi32(sum, outer), _mm_add_epi32(difference, inner),
        _mm_sub_epi32(difference, inner), _mm_sub_epi32(sum, outer)};
    for (int i = 0; i < 4; i++) {
        Vector odd = _mm_add_epi32(_mm_madd_epi16(z13, pair(ODD[i][0], ODD[i][1])),
            _mm_madd_epi16(z57, pair(ODD[i][2], ODD[i][3])));
        out[i] = _mm_srai_epi32(_mm_add_epi32(even[i], odd), shift);
        out[7 - i] = _mm_srai_epi32(_mm_sub_epi32(even[i], odd), shift);
    }
}

/* Replaces 8 rows by what one pass makes of them, saturated to 16 bits. */
static inline void pass_8(Vector rows[8], int shift)
{
    Vector left[8], right[8];
    even_odd_8(_mm_unpacklo_epi16(rows[0], rows[4]), _mm_unpacklo_epi16(rows[2], rows[6]),
        _mm_unpacklo_epi16(rows[1], rows[3]), _mm_unpacklo_epi16(rows[5], rows[7]), shift, left);
    even_odd_8(_mm_unpackhi_epi16(rows[0], rows[4]), _mm_unpackhi_epi16(rows[2], rows[6]),
        _mm_unpackhi_epi16(rows[1], rows[3]), _mm_unpackhi_epi16(rows[5], rows[7]), shift, right);
    for (int y = 0; y < 8; y++)
        rows[y] = _mm_packs_epi32(left[y], right[y]);
}

static inline void transpose_8(Vector rows[8])
{
    Vector a[8], b[8];
    for (int i = 0; i < 4; i++) {
        a[2 * i] = _mm_unpacklo_epi16(rows[i], rows[i + 4]);
        a[2 * i + 1] = _mm_unpackhi_epi16(rows[i], rows[i + 4]);
    }
    for (int i = 0; i < 4; i++) {
        b[2 * i] = _mm_unpacklo_epi16(a[i], a[i + 4]);
        b[2 * i + 1] = _mm_unpackhi_epi16(a[i], a[i + 4]);
    }
    for (int i = 0; i < 4; i++) {
        rows[2 * i] = _mm_unpacklo_epi16(b[i], b[i + 4]);
        rows[2 * i + 1] = _mm_unpackhi_epi16(b[i], b[i + 4]);
    }
}

/* Non-zero if a value of 8 rows is not within -limit to limit - 1. */
static inline Vector beyond(const Vector rows[8], int16_t limit)
{
    Vector low = rows[0], high = rows[0];
    for (int y = 1; y < 8; y++) {
        low = _mm_min_epi16(low, rows[y]);
        high = _mm_max_epi16(high, rows[y]);
    }
    return _mm_or_si128(_mm_cmplt_epi16(low, _mm_set1_epi16((int16_t)-limit)),
        _mm_cmpgt_epi16(high, _mm_set1_epi16((int16_t)(limit - 1))));
}

static inline int transform_8(
    const int16_t *block, const Dequantizer *dequantizer, uint8_t *out, size_t stride)
{
    Vector over = _mm_setzero_si128(), rows[8];
    for (int y = 0; y < 8; y++)
        rows[y] = dequantize(block, dequantizer, y, &over);
    pass_8(rows, 11);
    over = _mm_or_si128(over, beyond(rows, 8192));
    transpose_8(rows);
    pass_8(rows, 18);
    over = _mm_or_si128(over, beyond(rows, 512));
    transpose_8(rows);
    for (int y = 0; y < 8; y += 2, out += 2 * stride) {
        Vector samples = _mm_packus_epi16(_mm_add_epi16(rows[y], _mm_set1_epi16(128)),
            _mm_add_epi16(rows[y + 1], _mm_set1_epi16(128)));
        _mm_storel_epi64((Vector *)out, samples);
        _mm_storel_epi64((Vector *)(out + stride), _mm_srli_si128(samples, 8));
    }
    return !is_zero(over);
}

#else

/* Multiplies coefficients into `z`. Returns whether one is above its limit. */
static inline int dequantize(
    const int16_t *block, const Dequantizer *dequantizer, int count, int16_t *z)
{
    int16_t room = 0; /* negative if any limit - size is */
    for (int i = 0; i < count; i++) {
        int16_t size = (int16_t)(block[i] < 0 ? -block[i] : block[i]);
        room |= (int16_t)(dequantizer->limits[i] - size);
        z[i] = (int16_t)(block[i] * dequantizer->factors[i]);
    }
    return room < 0;
}

static inline int transform_2(
    const int16_t *block, const Dequantizer *dequantizer, uint8_t *out, size_t stride)
{
    int16_t z[40], rows[2][8];
    unsigned range = 0;
    if (dequantize(block, dequantizer, 40, z))
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
        out[0] = to_sample((even + odd) >> 20, &range);
        out[1] = to_sample((even - odd) >> 20, &range);
    }
    return range >> 10 != 0;
}

static inline int transform_4(
    const int16_t *block, const Dequantizer *dequantizer, uint8_t *out, size_t stride)
{
    int16_t z[56], rows[4][8];
    unsigned range = 0;
    if (dequantize(block, dequantizer, 56, z))
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
        out[0] = to_sample((first + even + outer) >> 19, &range);
        out[1] = to_sample((first - even + inner) >> 19, &range);
        out[2] = to_sample((first - even - inner) >> 19, &range);
        out[3] = to_sample((first + even - outer) >> 19, &range);
    }
    return range >> 10 != 0;
}

/* One pass over 8 values, a distance of 8 apart, into `out`, as far apart. */
static inline void pass_8(const int16_t *z, int shift, int32_t *out)
{
    int32_t half = 1 << (shift - 1), sum = (z[0] + z[32]) * 8192 + half;
    int32_t difference = (z[0] - z[32]) * 8192 + half;
    int32_t outer = z[16] * 10703 + z[48] * 4433, inner = z[16] * 4433 - z[48] * 10704;
    const int32_t even[4] = {sum + outer, difference + inner, difference - inner, sum - outer};
    const int32_t odd[4] = {z[8] * 11363 + z[24] * 9633 + z[40] * 6437 + z[56] * 2260,
        z[8] * 9633 - z[24] * 2259 - z[40] * 11362 - z[56] * 6436,
        z[8] * 6437 - z[24] * 11362 + z[40] * 2261 + z[56] * 9633,
        z[8] * 2260 - z[24] * 6436 + z[40] * 9633 - z[56] * 11363};
    for (int i = 0; i < 4; i++) {
        out[8 * i] = (even[i] + odd[i]) >> shift;
        out[56 - 8 * i] = (even[i] - odd[i]) >> shift;
    }
}

static inline int transform_8(
    const int16_t *block, const Dequantizer *dequantizer, uint8_t *out, size_t stride)
{
    int16_t z[64], turned[64];
    int32_t values[64];
    unsigned range = 0;
    if (dequantize(block, dequantizer, 64, z))
        return 1;
    for (int x = 0; x < 8; x++)
        pass_8(z + x, 11, values + x);
    for (int i = 0; i < 64; i++) {
        if (values[i] < -8192 || values[i] >= 8192)
            return 1;
        turned[(i & 7) * 8 + (i >> 3)] = (int16_t)values[i];
    }
    for (int y = 0; y < 8; y++)
        pass_8(turned + y, 18, values + y);
    for (int y = 0; y < 8; y++, out += stride)
        for (int x = 0; x < 8; x++) {
            int32_t value = values[8 * x + y];
            out[x] = to_sample(value, &range);
        }
    return range >> 10 != 0;
}

#endif

/* ---- colors */

/* Samples that are converted at once. Rows are read up to the next multiple of this. Their memory
   goes on for so long; what lies there does not matter, as those pixels are not written. */
#define STRIP 64

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

/* Chroma to twice its width, as libjpeg does it: each sample twice, or, if `smooth`, 3/4 of the
   nearer sample + 1/4 of the farther one. */
static void widen(const uint8_t *restrict in, int count, uint8_t *restrict out, int smooth)
{
    for (int x = 0; x < count; x++) {
        int left = in[x ? x - 1 : 0], right = in[x + 1 < count ? x + 1 : x];
        out[2 * x] = (uint8_t)(smooth ? (3 * in[x] + left + 1) >> 2 : in[x]);
        out[2 * x + 1] = (uint8_t)(smooth ? (3 * in[x] + right + 2) >> 2 : in[x]);
    }
}

#endif
