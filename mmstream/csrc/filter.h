/* Rows of samples, resized by a bicubic filter with antialiasing.

   The filter is that of Pillow and torch: a = -0.5, stretched by the scale. A row of the result is
   first the weighted sum of rows, and then of its own columns. All weights are integers, so SSE2
   code and portable code give the same samples. It is compiled without contraction of
   floating-point operations (setup.py), so all machines have the same weights. */

#ifndef FILTER_H
#define FILTER_H

#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#ifdef __SSE2__
#include <emmintrin.h>
#endif

#define WEIGHT_BITS 14
#define TAPS 8 /* the weights of an output sample are a multiple of this */
#define HALF_START 2 /* of a half: samples at the edge have other weights */

typedef struct {
    int taps;
    int *starts;      /* of each output sample: its first input sample */
    int16_t *weights; /* `taps` of each output sample, with the sum 1 << WEIGHT_BITS */
    int half_stop; /* from HALF_START up to this sample, the weights are those of a half */
} Filter;

static double cubic(double x)
{
    x = x < 0 ? -x : x;
    if (x < 1)
        return (1.5 * x - 2.5) * x * x + 1;
    return x < 2 ? ((-0.5 * x + 2.5) * x - 4) * x + 2 : 0;
}

/* Fills in the weights of the output sample whose middle is at `center`, in input samples. It is
   within the input, so the sum is above 0. `width` is that of an output sample. */
static void fill_weights(double center, double width, int size, int taps, int *start, int16_t *out)
{
    double sum = 0, first = center - 2 * width + 0.5;
    const int from = first < 0 ? 0 : (int)first, count = size - from < taps ? size - from : taps;
    int rest = 1 << WEIGHT_BITS, largest = 0;
    for (int i = 0; i < count; i++)
        sum += cubic((from + i + 0.5 - center) / width);
    for (int i = 0; i < taps; i++) {
        double value = i < count ? cubic((from + i + 0.5 - center) / width) / sum : 0;
        out[i] = (int16_t)((int)(value * (1 << WEIGHT_BITS) + 65536.5) - 65536); /* rounded */
        rest -= out[i];
        largest = out[i] > out[largest] ? i : largest;
    }
    out[largest] = (int16_t)(out[largest] + rest);
    *start = from;
}

/* Makes the filter of one axis. Output samples are `scale` input samples apart. */
static int make_filter(Filter *filter, int size, int out_size, double scale)
{
    const double width = scale < 1 ? 1 : scale;
    filter->taps = (int)((4 * width + TAPS - 0.001) / TAPS) * TAPS;
    filter->starts = malloc((size_t)out_size * sizeof(int));
    filter->weights = malloc((size_t)out_size * (size_t)filter->taps * sizeof(int16_t));
    if (!filter->starts || !filter->weights)
        return 0;
    filter->half_stop = scale == 2 ? (size - 3) / 2 : 0; /* later samples have taps outside */
    if (filter->half_stop > out_size)
        filter->half_stop = out_size;
    for (int i = 0; i < out_size; i++) {
        int16_t *weights = filter->weights + (size_t)i * (size_t)filter->taps;
        if (i > HALF_START && i < filter->half_stop) { /* as the sample before, 2 further on */
            memcpy(weights, weights - filter->taps, (size_t)filter->taps * sizeof(int16_t));
            filter->starts[i] = filter->starts[i - 1] + 2;
        } else
            fill_weights(
                (i + 0.5) * scale, width, size, filter->taps, filter->starts + i, weights);
    }
    return 1;
}

static void free_filter(Filter *filter)
{
    free(filter->starts);
    free(filter->weights);
}

/* ---- sums

   Between the two sums a sample has MORE_BITS more than 8. */

#define MORE_BITS 5

/* ---- halves

   Photographs often become exactly half as large. Then the weights are the same for nearly all
   samples: -3 -9 29 111 111 29 -9 -3 of 256, from input sample 2 * x - 3 on. So they need not be
   read, and the sums are the same with fewer multiplications. */

#define HALF_BITS 8

#ifdef __SSE2__

/* 111 a + 29 b - 9 c - 3 d of 8 samples, divided by 8. As 8 (14 a + 4 b - c) - (a + 3 b + c + 3 d)
   it never needs more than 16 bits: a to d are sums of two samples. */
static inline __m128i half_of(__m128i a, __m128i b, __m128i c, __m128i d)
{
    __m128i whole = _mm_sub_epi16(
        _mm_add_epi16(_mm_mullo_epi16(a, _mm_set1_epi16(14)), _mm_slli_epi16(b, 2)), c);
    __m128i rest = _mm_add_epi16(
        _mm_add_epi16(a, c), _mm_mullo_epi16(_mm_add_epi16(b, d), _mm_set1_epi16(3)));
    return _mm_add_epi16(whole, _mm_srai_epi16(_mm_sub_epi16(_mm_set1_epi16(4), rest), 3));
}

/* Does what sum_rows() does, with the weights of a half. Returns the first sample that is left. */
static int halve_rows(const uint8_t *const *rows, int width, int16_t *out)
{
    const __m128i zero = _mm_setzero_si128();
    int x = 0;
    for (; x + 16 <= width; x += 16) {
        __m128i low[4], high[4]; /* sums of the two rows that are as far from the middle */
        for (int i = 0; i < 4; i++) {
            __m128i above = _mm_loadu_si128((const __m128i *)(rows[3 - i] + x));
            __m128i below = _mm_loadu_si128((const __m128i *)(rows[4 + i] + x));
            low[i] = _mm_add_epi16(_mm_unpacklo_epi8(above, zero), _mm_unpacklo_epi8(below, zero));
            high[i] = _mm_add_epi16(_mm_unpackhi_epi8(above, zero), _mm_unpackhi_epi8(below, zero));
        }
        _mm_storeu_si128((__m128i *)(out + x), half_of(low[0], low[1], low[2], low[3]));
        _mm_storeu_si128((__m128i *)(out + x + 8), half_of(high[0], high[1], high[2], high[3]));
    }
    return x;
}

/* Four times a pair of weights of a half, for _mm_madd_epi16. */
static inline __m128i weight_pair(int16_t first, int16_t second)
{
    return _mm_set1_epi32((int)((uint32_t)(uint16_t)first | (uint32_t)(uint16_t)second << 16));
}

/* Four sums of sum_columns(), with the weights of a half. */
static inline __m128i half_columns(const int16_t *in)
{
    const __m128i *a = (const __m128i *)in, *b = (const __m128i *)(in + 2);
    const __m128i *c = (const __m128i *)(in + 4), *d = (const __m128i *)(in + 6);
    __m128i left = _mm_add_epi32(_mm_madd_epi16(_mm_loadu_si128(a), weight_pair(-3, -9)),
        _mm_madd_epi16(_mm_loadu_si128(b), weight_pair(29, 111)));
    __m128i right = _mm_add_epi32(_mm_madd_epi16(_mm_loadu_si128(c), weight_pair(111, 29)),
        _mm_madd_epi16(_mm_loadu_si128(d), weight_pair(-9, -3)));
    __m128i half = _mm_set1_epi32(1 << (HALF_BITS + MORE_BITS - 1));
    return _mm_srai_epi32(_mm_add_epi32(_mm_add_epi32(left, right), half), HALF_BITS + MORE_BITS);
}

/* Does what sum_columns() does, with the weights of a half. Returns the first sample that is left. */
static int halve_columns(const int16_t *row, int x, int stop, uint8_t *out)
{
    for (; x + 8 <= stop; x += 8) {
        const int16_t *in = row + 2 * x - 3;
        __m128i samples = _mm_packs_epi32(half_columns(in), half_columns(in + 8));
        _mm_storel_epi64((__m128i *)(out + x), _mm_packus_epi16(samples, samples));
    }
    return x;
}

#endif

/* ---- any size */

/* Row `y` of output samples, as the weighted sum of `rows`. */
static void sum_rows(
    const uint8_t *const *rows, const Filter *filter, int y, int width, int16_t *out)
{
    const int taps = filter->taps, shift = WEIGHT_BITS - MORE_BITS;
    const int16_t *weights = filter->weights + (size_t)y * (size_t)taps;
    int x = 0;
#ifdef __SSE2__
    const __m128i zero = _mm_setzero_si128();
    if (y >= HALF_START && y < filter->half_stop)
        x = halve_rows(rows, width, out);
    for (; x + 16 <= width; x += 16) {
        __m128i sums[4];
        for (int i = 0; i < 4; i++)
            sums[i] = _mm_set1_epi32(1 << (shift - 1));
        for (int t = 0; t < taps; t += 2) {
            int32_t both;
            memcpy(&both, weights + t, 4);
            if (!both)
                continue;
            __m128i weight = _mm_set1_epi32(both);
            __m128i a = _mm_loadu_si128((const __m128i *)(rows[t] + x));
            __m128i b = _mm_loadu_si128((const __m128i *)(rows[t + 1] + x));
            __m128i low = _mm_unpacklo_epi8(a, b), high = _mm_unpackhi_epi8(a, b);
            sums[0] = _mm_add_epi32(sums[0], _mm_madd_epi16(_mm_unpacklo_epi8(low, zero), weight));
            sums[1] = _mm_add_epi32(sums[1], _mm_madd_epi16(_mm_unpackhi_epi8(low, zero), weight));
            sums[2] = _mm_add_epi32(sums[2], _mm_madd_epi16(_mm_unpacklo_epi8(high, zero), weight));
            sums[3] = _mm_add_epi32(sums[3], _mm_madd_epi16(_mm_unpackhi_epi8(high, zero), weight));
        }
        for (int i = 0; i < 4; i++)
            sums[i] = _mm_srai_epi32(sums[i], shift);
        _mm_storeu_si128((__m128i *)(out + x), _mm_packs_epi32(sums[0], sums[1]));
        _mm_storeu_si128((__m128i *)(out + x + 8), _mm_packs_epi32(sums[2], sums[3]));
    }
#endif
    for (; x < width; x++) {
        int32_t sum = 1 << (shift - 1);
        for (int t = 0; t < taps; t++)
            sum += weights[t] * rows[t][x];
        out[x] = (int16_t)(sum >> shift);
    }
}

/* Output samples `x` to `stop` of a row. The row goes on for `taps` samples after its end, whose
   weights are zero. */
static void sum_columns(const int16_t *row, const Filter *filter, int x, int stop, uint8_t *out)
{
    const int taps = filter->taps, shift = WEIGHT_BITS + MORE_BITS;
    const int16_t *weights = filter->weights + (size_t)x * (size_t)taps;
#ifdef __SSE2__
    for (; x + 4 <= stop; x += 4, weights += 4 * taps) {
        __m128i sums[4];
        for (int i = 0; i < 4; i++) {
            const int16_t *in = row + filter->starts[x + i], *w = weights + i * taps;
            sums[i] = _mm_madd_epi16(
                _mm_loadu_si128((const __m128i *)in), _mm_loadu_si128((const __m128i *)w));
            for (int t = TAPS; t < taps; t += TAPS)
                sums[i] = _mm_add_epi32(sums[i],
                    _mm_madd_epi16(_mm_loadu_si128((const __m128i *)(in + t)),
                        _mm_loadu_si128((const __m128i *)(w + t))));
        }
        __m128i a = _mm_add_epi32(
            _mm_unpacklo_epi32(sums[0], sums[1]), _mm_unpackhi_epi32(sums[0], sums[1]));
        __m128i b = _mm_add_epi32(
            _mm_unpacklo_epi32(sums[2], sums[3]), _mm_unpackhi_epi32(sums[2], sums[3]));
        __m128i sum = _mm_add_epi32(_mm_unpacklo_epi64(a, b), _mm_unpackhi_epi64(a, b));
        sum = _mm_srai_epi32(_mm_add_epi32(sum, _mm_set1_epi32(1 << (shift - 1))), shift);
        sum = _mm_packs_epi32(sum, sum);
        int32_t samples = _mm_cvtsi128_si32(_mm_packus_epi16(sum, sum));
        memcpy(out + x, &samples, 4);
    }
#endif
    for (; x < stop; x++, weights += taps) {
        int32_t sum = 1 << (shift - 1);
        for (int t = 0; t < taps; t++)
            sum += weights[t] * row[filter->starts[x] + t];
        sum >>= shift;
        out[x] = (uint8_t)(sum < 0 ? 0 : sum > 255 ? 255 : sum);
    }
}

/* One row of output samples. */
static void resize_row(const int16_t *row, const Filter *filter, int width, uint8_t *out)
{
    int x = 0;
#ifdef __SSE2__
    if (filter->half_stop > HALF_START) {
        sum_columns(row, filter, 0, HALF_START, out);
        x = halve_columns(row, HALF_START, filter->half_stop, out);
    }
#endif
    sum_columns(row, filter, x, width, out);
}

#endif
