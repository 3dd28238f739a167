/* A JPEG decoded at 1/4 or 1/8 of its size: read_headers() first, then decode().

   Most of the time of a reduced decoding goes into Huffman codes of coefficients that it does not
   need. This decoder passes several of them at once. Its pixels are those of libjpeg-turbo, bit for
   bit. It takes plain, whole baseline files only and leaves every other file to libjpeg. A file of
   which libjpeg would warn is left to libjpeg, too.

   headers.h reads the file up to its scan. entropy.h reads coefficients. pixels.h turns them into
   RGB. This file reads the scan, one batch of MCUs at a time. It needs no Python, so the fuzzer can
   build it alone (tools/prove/fuzz_jpeg.sh). Call fill_samples() once before the first picture. */

#ifndef DECODE_H
#define DECODE_H

#include <stdlib.h>

#include "headers.h"

#define PADDING 16 /* zeros after the data: two refills */

/* ---- the scan

   Restart markers divide it into segments. Without them it is one segment. */

typedef struct {
    const uint8_t *data; /* the rest of the file, from the next marker */
    size_t size;
    uint8_t *clean; /* the present segment without stuffing (0 after 0xff), and PADDING */
    size_t length;  /* of the segment, without PADDING */
    int mcus_left, restarts;
    Bits bits;
} Scan;

/* Copies the data up to the next marker to `clean`. Returns 0 if no marker follows. */
static int unstuff(Scan *scan)
{
    if (!scan->size)
        return 0;
    const uint8_t *from = scan->data, *last = from + scan->size - 1; /* a marker has two bytes */
    uint8_t *to = scan->clean;
    while (from < last) {
        const uint8_t *marker = memchr(from, 0xff, (size_t)(last - from));
        if (!marker)
            return 0;
        memcpy(to, from, (size_t)(marker - from));
        to += marker - from;
        from = marker;
        if (from[1]) {
            scan->length = (size_t)(to - scan->clean);
            memset(to, 0, PADDING);
            scan->size -= (size_t)(from - scan->data);
            scan->data = from;
            scan->bits = (Bits){scan->clean, to + 8, 0, 0};
            return 1;
        }
        *to++ = 0xff;
        from += 2;
    }
    return 0;
}

/* Whether exactly the bytes of the segment were used. At most 7 bits of the last one are left. */
static int segment_is_used(const Scan *scan)
{
    size_t used = (size_t)(scan->bits.next - scan->clean) * 8 - scan->bits.left;
    return (used + 7) / 8 == scan->length;
}

/* Goes on after a restart marker. Returns 0 if the next marker is not the expected one. */
static int restart(Picture *picture, Scan *scan)
{
    if (!segment_is_used(scan) || scan->data[1] != RST0 + (scan->restarts++ & 7))
        return 0;
    scan->data += 2;
    scan->size -= 2;
    scan->mcus_left = picture->restart_interval;
    for (int i = 0; i < picture->count; i++)
        picture->components[i].dc = 0;
    return unstuff(scan);
}

/* Replaces differences of DC by DC. Returns whether a DC is out of range. This is a pass of its own
   because a transform loads 16 bytes at once, which is slow right after a write of 2 of them. */
static int sum_dc(Picture *picture, int mcus)
{
    unsigned range = 0;
    int16_t *block = picture->blocks;
    for (int n = 0; n < mcus; n++)
        for (Component *c = picture->components; c < picture->components + picture->count; c++)
            for (int i = c->across * c->down; i; i--, block += SLOTS) {
                c->dc += block[0];
                block[0] = (int16_t)c->dc;
                range |= (unsigned)c->dc + 2048;
            }
    return range >> 12 != 0;
}

/* Transforms the blocks of one component in `count` MCUs; the first is number `column` of its row.
   Returns non-zero for a block that is left to libjpeg.

   Example: an MCU has 2x2 luma blocks that become 2x2 samples each. MCU 5 begins at sample 20 of
   its row. Its block 3 begins at sample 22, two rows of samples below. */
static int transform_batch(const Picture *picture, const Component *c, int column, int count)
{
    int out_of_range = 0;
    unsigned range = 0;
    const size_t side = (size_t)c->side, across = side * (size_t)c->across;
    uint8_t *out = c->rows + (size_t)column * across;
    const int16_t *block = picture->blocks + c->first_block * SLOTS;
    for (int n = 0; n < count; n++, out += across, block += picture->mcu_blocks * SLOTS)
        for (int i = 0; i < c->across * c->down; i++) {
            const int16_t *b = block + i * SLOTS;
            uint8_t *o = out + (size_t)(i & 1) * side + (size_t)(i >> 1) * side * c->stride;
            if (side == 8)
                out_of_range |= transform_8(b, &c->dequantizer, o, c->stride);
            else if (side == 4)
                out_of_range |= transform_4(b, &c->dequantizer, o, c->stride);
            else if (side == 2)
                out_of_range |= transform_2(b, &c->dequantizer, o, c->stride);
            else {
                *o = to_sample((b[0] * c->dequantizer.factors[0] + 4) >> 3, &range);
                out_of_range |= range >> 10 != 0;
            }
        }
    return out_of_range;
}

/* Reads and transforms `count` MCUs. Returns 0 for a file that is left to libjpeg. */
static int read_batch(Picture *picture, Bits *bits, int column, int count)
{
    const int blocks = count * picture->mcu_blocks;
    memset(picture->blocks, 0, (size_t)(blocks * SLOTS) * sizeof(int16_t));
    if (!read_blocks(bits, picture->readers, picture->readers + blocks, picture->blocks)
        || sum_dc(picture, count))
        return 0;
    for (int i = 0; i < picture->count; i++)
        if (transform_batch(picture, &picture->components[i], column, count))
            return 0;
    return 1;
}

/* Converts one row of samples to RGB. `wide` has room for two rows of chroma at full width. */
static void write_row(const Picture *picture, size_t y, int width, uint8_t *wide, uint8_t *rgb)
{
    const Component *c = picture->components;
    const uint8_t *luma = c[0].rows + y * c[0].stride;
    if (picture->count == 1) {
        for (int x = 0; x < width; x++)
            rgb[3 * x] = rgb[3 * x + 1] = rgb[3 * x + 2] = luma[x];
        return;
    }
    const uint8_t *blue = c[1].rows + y * c[1].stride, *red = c[2].rows + y * c[2].stride;
    if (c->across > c->down) {
        int half = divide_up(width, 2);
        widen(blue, half, wide, picture->factor == 4);
        widen(red, half, wide + 2 * half, picture->factor == 4);
        blue = wide;
        red = wide + 2 * half;
    }
    to_rgb(luma, blue, red, rgb, width);
}

static int rows_of_mcu(const Component *c) { return c->down * c->side; }

static int mcu_columns(const Picture *picture)
{
    return divide_up(picture->width, 8 * picture->components->across);
}

/* Reads one row of MCUs into the rows of the components. Returns 0 for a file that is left to
   libjpeg. */
static int read_band(Picture *picture, Scan *scan)
{
    const int columns = mcu_columns(picture);
    for (int column = 0, count; column < columns; column += count) {
        count = columns - column < BATCH ? columns - column : BATCH;
        if (picture->restart_interval) {
            if (!scan->mcus_left && !restart(picture, scan))
                return 0;
            count = scan->mcus_left < count ? scan->mcus_left : count;
            scan->mcus_left -= count;
        }
        if (!read_batch(picture, &scan->bits, column, count))
            return 0;
    }
    return 1;
}

/* Begins the scan. Returns 0 for a file that is left to libjpeg. */
static int begin_scan(const Picture *picture, Scan *scan)
{
    scan->mcus_left = picture->restart_interval;
    return unstuff(scan);
}

/* Whether the scan ends as it should after its last row. Bytes after the end marker do not
   matter. */
static int is_end(const Scan *scan) { return segment_is_used(scan) && scan->data[1] == EOI; }

/* Reads the scan and writes the picture, a row of MCUs at a time. Returns 0 for a file that is left
   to libjpeg. */
static int read_scan(Picture *picture, Scan *scan, uint8_t *wide, uint8_t *rgb)
{
    const int width = divide_up(picture->width, picture->factor);
    const int height = divide_up(picture->height, picture->factor);
    const int band = rows_of_mcu(picture->components);
    if (!begin_scan(picture, scan))
        return 0;
    for (int top = 0; top < height; top += band) {
        if (!read_band(picture, scan))
            return 0;
        for (int y = 0; y < band && top + y < height; y++, rgb += 3 * (size_t)width)
            write_row(picture, (size_t)y, width, wide, rgb);
    }
    return is_end(scan);
}

/* Sets the stride of each component and who reads which block. Returns the bytes of one row of MCUs
   of all components. */
static size_t arrange_mcus(Picture *picture)
{
    size_t bytes = 0;
    int blocks = 0;
    for (int i = 0; i < picture->count; i++) {
        Component *c = &picture->components[i];
        c->first_block = blocks;
        for (int j = c->across * c->down; j--; blocks++)
            picture->readers[blocks] = (BlockReader){&picture->dc[c->dc_table],
                &picture->ac[c->ac_table], picture->dc_entries[c->dc_table],
                picture->ac_entries[c->side > 1][c->ac_table], c->slots};
        c->stride = (size_t)(mcu_columns(picture) * c->across * c->side);
        bytes += c->stride * (size_t)rows_of_mcu(c);
    }
    picture->mcu_blocks = blocks;
    for (int i = blocks; i <= BATCH * blocks; i++)
        picture->readers[i] = picture->readers[i - blocks];
    return bytes;
}

/* Decodes the entropy-coded `data` into `rgb`, after read_headers(). `rgb` has 3 bytes for each
   pixel of the reduced picture. Its sides are those of the picture / factor, rounded up.
   Returns 1 if `rgb` holds the picture, 0 for a file that is left to libjpeg or without memory.

   One allocation holds, in this order: two widened rows of chroma, one row of MCUs of each
   component, and the present segment of the scan. STRIP spare bytes follow the first and the second
   of them, because to_rgb() reads rows in pieces of this size. */
static int decode(Picture *picture, const uint8_t *data, size_t size, uint8_t *rgb)
{
    const size_t wide = 2 * ((size_t)divide_up(picture->width, picture->factor) + 1) + STRIP;
    const size_t rows = arrange_mcus(picture);
    uint8_t *memory = malloc(wide + rows + STRIP + size + PADDING);
    if (!memory)
        return 0;
    uint8_t *next_rows = memory + wide;
    for (int i = 0; i < picture->count; i++) {
        Component *c = &picture->components[i];
        c->rows = next_rows;
        next_rows += c->stride * (size_t)rows_of_mcu(c);
    }
    Scan scan = {.data = data, .size = size, .clean = next_rows + STRIP};
    int accepted = read_scan(picture, &scan, memory, rgb);
    free(memory);
    return accepted;
}

#endif
