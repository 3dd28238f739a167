/* A JPEG's header: what a reduced decoding needs to know, and whether the file is plain enough.
   Included by reduced.c alone. */

#ifndef HEADERS_H
#define HEADERS_H

#include "entropy.h"
#include "pixels.h"

#define SHORTEST_SIDE 24 /* shorter ones are scaled by other rules */
#define LONGEST_SIDE 65500
#define BATCH 4 /* MCUs that are read before they are transformed */
#define MCU_BLOCKS 6

#define MAX_TABLES 32 /* of Huffman codes: each takes microseconds, and a file may have millions */

typedef struct {
    int id, across, down, quantizer, dc_table, ac_table;
    int side; /* samples that a block becomes: 1, 2 or 4 each way */
    int dc;
    uint8_t slots[2 * BLOCK]; /* by place in zigzag order: where in a block a coefficient goes */
    Scales scales;
    int first_block; /* of an MCU's */
    uint8_t *rows;   /* samples of one row of MCUs */
    size_t stride;
} Component;

typedef struct {
    int factor, width, height, count, restart_interval, num_tables, jfif, adobe, profile;
    Component components[3];
    uint8_t quantizers[4][1 + BLOCK]; /* defined or not, then in zigzag order */
    Huffman dc[4], ac[4];
    uint64_t dc_entries[4][1 << INDEX_BITS];
    uint64_t ac_entries[2][4][1 << INDEX_BITS]; /* of values that are not wanted, and that are */
    int mcu_blocks;
    Step steps[BATCH * MCU_BLOCKS + 1];
    int16_t blocks[BATCH * MCU_BLOCKS * BLOCK];
} Picture;

static int divide_up(int value, int by) { return (value + by - 1) / by; }

/* ---- segments. Each function returns 0 for what is left to libjpeg. */

static int read_quantizers(Picture *picture, const uint8_t *p, size_t size)
{
    for (; size > BLOCK; p += 1 + BLOCK, size -= 1 + BLOCK) {
        if (p[0] > 3 || memchr(p + 1, 0, BLOCK))
            return 0;
        memcpy(picture->quantizers[p[0]], p, 1 + BLOCK);
        picture->quantizers[p[0]][0] = 1;
    }
    return size == 0;
}

static int read_huffman(Picture *picture, const uint8_t *p, size_t size)
{
    while (size >= 17) {
        if (++picture->num_tables > MAX_TABLES)
            return 0;
        size_t count = 0;
        for (int i = 1; i <= 16; i++)
            count += p[i];
        if ((p[0] & ~0x13) || count > 256 || count > size - 17)
            return 0;
        if (p[0] < 16)
            for (size_t i = 0; i < count; i++)
                if (p[17 + i] > 11)
                    return 0;
        if (!define_huffman((p[0] < 16 ? picture->dc : picture->ac) + (p[0] & 3), p + 1, p + 17))
            return 0;
        p += 17 + count, size -= 17 + count;
    }
    return size == 0;
}

static int read_frame(Picture *picture, const uint8_t *p, size_t size)
{
    Component *c = picture->components;
    if (picture->count || size < 6 || p[0] != 8 || (p[5] != 1 && p[5] != 3)
        || size != 6 + 3u * p[5])
        return 0;
    picture->height = p[1] << 8 | p[2], picture->width = p[3] << 8 | p[4];
    picture->count = p[5];
    if (picture->height < SHORTEST_SIDE || picture->width < SHORTEST_SIDE
        || picture->height > LONGEST_SIDE || picture->width > LONGEST_SIDE)
        return 0;
    for (int i = 0; i < picture->count; i++, p += 3) {
        c[i].id = p[6], c[i].across = p[7] >> 4, c[i].down = p[7] & 15, c[i].quantizer = p[8];
        c[i].side = 8 / picture->factor;
        if (c[i].quantizer > 3 || (i && (c[i].across != 1 || c[i].down != 1)))
            return 0;
    }
    if (c->across < 1 || c->across > 2 || c->down < 1 || c->down > c->across)
        return 0;
    if (picture->count == 1)
        c->across = c->down = 1;
    else if (c[0].id == c[1].id || c[0].id == c[2].id || c[1].id == c[2].id)
        return 0;
    else if (c->down == 2) /* chroma of half the height is not enlarged, but reduced less */
        c[1].side *= 2, c[2].side *= 2;
    return 1;
}

static int read_application(Picture *picture, int marker, const uint8_t *p, size_t size)
{
    if (marker == 0xe0 && size >= 5 && !memcmp(p, "JFIF", 5))
        return picture->jfif = size >= 14 && p[5] == 1;
    if (marker == 0xee && size >= 5 && !memcmp(p, "Adobe", 5))
        return picture->adobe = size >= 12 && p[11] == 1; /* YCbCr */
    if (marker == 0xe2 && size >= 12 && !memcmp(p, "ICC_PROFILE", 12))
        return size > 14 && p[12] == 1 && p[13] == 1 && !picture->profile++;
    return 1;
}

/* Which coefficients a transform reads, where it finds them, and what they are multiplied by. */
static void arrange(Component *c, const uint8_t *quantizer)
{
    static const uint8_t ZIGZAG[BLOCK] = {
        0, 1, 8, 16, 9, 2, 3, 10, 17, 24, 32, 25, 18, 11, 4, 5, 12, 19, 26, 33, 40, 48,
        41, 34, 27, 20, 13, 6, 7, 14, 21, 28, 35, 42, 49, 56, 57, 50, 43, 36, 29, 22, 15, 23,
        30, 37, 44, 51, 58, 59, 52, 45, 38, 31, 39, 46, 53, 60, 61, 54, 47, 55, 62, 63,
    };
    static const int LANES[8] = {0, 4, 2, 5, 1, 6, 3, 7};
    static const int WANTED[2][8] = {{0, 1, -1, 2, -1, 3, -1, 4}, {0, 1, 2, 3, -1, 4, 5, 6}};
    const int *wanted = WANTED[c->side == 4];
    memset(c->slots, SPARE, sizeof c->slots);
    for (int i = 0; i < BLOCK; i++) {
        int row = wanted[ZIGZAG[i] >> 3], column = ZIGZAG[i] & 7;
        if (row < 0 || wanted[column] < 0)
            continue;
        c->slots[i] = (uint8_t)(8 * row + LANES[column]);
        c->scales.quanta[c->slots[i]] = quantizer[i];
        c->scales.limits[c->slots[i]] = (int16_t)(LARGEST / quantizer[i]);
    }
}

static int read_scan_header(Picture *picture, const uint8_t *p, size_t size)
{
    int count = picture->count, labelled = count == 1 || picture->jfif || picture->adobe;
    if (!count || size != 4 + 2u * (unsigned)count || p[0] != count || p[size - 3] != 0
        || p[size - 2] != 63 || p[size - 1] != 0)
        return 0;
    p++;
    for (int i = 0; i < count; i++, p += 2) {
        Component *c = &picture->components[i];
        c->dc_table = p[1] >> 4, c->ac_table = p[1] & 15;
        if (p[0] != c->id || (!labelled && c->id != i + 1) || c->dc_table > 3 || c->ac_table > 3
            || !picture->dc[c->dc_table].defined || !picture->ac[c->ac_table].defined
            || !picture->quantizers[c->quantizer][0])
            return 0;
        arrange(c, picture->quantizers[c->quantizer] + 1);
        build_dc(&picture->dc[c->dc_table], picture->dc_entries[c->dc_table]);
        build_ac(&picture->ac[c->ac_table], c->side > 1,
            picture->ac_entries[c->side > 1][c->ac_table]);
    }
    return 1;
}

/* Returns the offset of the entropy-coded data. */
static size_t read_headers(Picture *picture, const uint8_t *data, size_t size)
{
    size_t at = 2;
    if (size < 4 || data[0] != 0xff || data[1] != 0xd8)
        return 0;
    while (size - at >= 4 && data[at] == 0xff) {
        int marker = data[at + 1], good = 0;
        size_t length = (size_t)(data[at + 2] << 8 | data[at + 3]);
        const uint8_t *p = data + at + 4;
        if (length < 2 || length > size - at - 2)
            return 0;
        at += 2 + length, length -= 2;
        if (marker == 0xda)
            return read_scan_header(picture, p, length) ? at : 0;
        if (marker == 0xdb)
            good = read_quantizers(picture, p, length);
        else if (marker == 0xc4)
            good = read_huffman(picture, p, length);
        else if (marker == 0xc0 || marker == 0xc1)
            good = read_frame(picture, p, length);
        else if (marker == 0xdd && length == 2)
            picture->restart_interval = p[0] << 8 | p[1], good = 1;
        else if ((marker >= 0xe0 && marker <= 0xef) || marker == 0xfe)
            good = read_application(picture, marker, p, length);
        if (!good)
            return 0;
    }
    return 0;
}

#endif
