/* The segments of a JPEG up to its scan: sizes and tables, and whether this decoder takes the file.

   First stage of the decoder. It takes plain baseline files only; everything else is left to
   libjpeg. Included by decode.h only. */

#ifndef HEADERS_H
#define HEADERS_H

#include "entropy.h"
#include "pixels.h"

#define SHORTEST_SIDE 24   /* libjpeg scales shorter sides by other rules */
#define LONGEST_SIDE 65500 /* libjpeg's own limit */
#define BATCH 4            /* MCUs that are read before they are transformed */
#define MCU_BLOCKS 6       /* most blocks of an MCU: 4 of luma, 2 of chroma */

/* Most Huffman tables a file may define. Each costs microseconds, and a file may hold millions. */
#define MAX_TABLES 32

enum { /* the second bytes of markers */
    SOF0 = 0xc0, /* baseline frame */
    SOF1 = 0xc1, /* extended sequential frame, the same for 8 bits and Huffman codes */
    DHT = 0xc4,
    RST0 = 0xd0,
    SOI = 0xd8,
    EOI = 0xd9,
    SOS = 0xda,
    DQT = 0xdb,
    DRI = 0xdd,
    APP0 = 0xe0,
    APP2 = 0xe2,
    APP14 = 0xee,
    APP15 = 0xef,
    COM = 0xfe
};

typedef struct {
    int id, quantizer, dc_table, ac_table;
    int across, down; /* blocks of an MCU */
    int side;         /* samples that a block becomes, each way: 1, 2, 4 or 8 */
    int dc;           /* of the last block */
    /* By zigzag position: where in a block a coefficient is stored. The second half is all
       UNUSED_SLOT, for positions after the block's end. */
    uint8_t slots[2 * BLOCK];
    Dequantizer dequantizer;
    int first_block; /* index of its first block in an MCU */
    uint8_t *rows;   /* samples of one row of MCUs */
    size_t stride;
} Component;

typedef struct {
    int factor;    /* how many times smaller the result is: 4 or 8; of planes 1 or 2, too */
    int is_planes; /* whether the result is one plane for each component, and not RGB */
    int chroma_factor; /* of planes: how many times smaller chroma of full size becomes */
    int width, height, count, restart_interval, num_tables, has_jfif, has_adobe, has_profile;
    Component components[3];
    int quantizer_defined[4];
    uint8_t quantizers[4][BLOCK]; /* in zigzag order */
    Huffman dc[4], ac[4];
    uint64_t dc_entries[4][1 << INDEX_BITS];
    uint64_t ac_entries[2][4][1 << INDEX_BITS]; /* without values, and with values */
    int mcu_blocks;
    BlockReader readers[BATCH * MCU_BLOCKS + 1];
    int16_t blocks[BATCH * MCU_BLOCKS * SLOTS];
} Picture;

static int divide_up(int value, int divisor) { return (value + divisor - 1) / divisor; }

/* ---- segments: each function returns 0 for a file that is left to libjpeg */

static int read_quantizers(Picture *picture, const uint8_t *p, size_t size)
{
    for (; size > BLOCK; p += 1 + BLOCK, size -= 1 + BLOCK) {
        if (p[0] > 3 || memchr(p + 1, 0, BLOCK)) /* 16 bits or a wrong index; a zero */
            return 0;
        memcpy(picture->quantizers[p[0]], p + 1, BLOCK);
        picture->quantizer_defined[p[0]] = 1;
    }
    return size == 0;
}

static int read_huffman(Picture *picture, const uint8_t *p, size_t size)
{
    while (size >= 17) {
        if (++picture->num_tables > MAX_TABLES)
            return 0;
        const int is_ac = p[0] >> 4, index = p[0] & 15;
        size_t count = 0;
        for (int i = 1; i <= 16; i++)
            count += p[i];
        if (is_ac > 1 || index > 3 || count > 256 || count > size - 17)
            return 0;
        if (!is_ac)
            for (size_t i = 0; i < count; i++)
                if (p[17 + i] > 11) /* the size of a DC difference */
                    return 0;
        if (!define_huffman((is_ac ? picture->ac : picture->dc) + index, p + 1, p + 17))
            return 0;
        p += 17 + count;
        size -= 17 + count;
    }
    return size == 0;
}

/* Takes grey files, and files of three components with chroma at full size, at half the width, or
   at half of both sides. */
static int read_frame(Picture *picture, const uint8_t *p, size_t size)
{
    Component *c = picture->components;
    if (picture->count || size < 6 || p[0] != 8 || (p[5] != 1 && p[5] != 3)
        || size != 6 + 3u * p[5])
        return 0;
    picture->height = p[1] << 8 | p[2];
    picture->width = p[3] << 8 | p[4];
    picture->count = p[5];
    if (picture->height < SHORTEST_SIDE || picture->width < SHORTEST_SIDE
        || picture->height > LONGEST_SIDE || picture->width > LONGEST_SIDE)
        return 0;
    for (int i = 0; i < picture->count; i++, p += 3) {
        c[i].id = p[6];
        c[i].across = p[7] >> 4;
        c[i].down = p[7] & 15;
        c[i].quantizer = p[8];
        c[i].side = 8 / picture->factor;
        if (c[i].quantizer > 3 || (i && (c[i].across != 1 || c[i].down != 1)))
            return 0;
    }
    if (c->across < 1 || c->across > 2 || c->down < 1 || c->down > c->across)
        return 0;
    if (picture->count == 1) /* an MCU of one component is one block, whatever the file says */
        c->across = c->down = 1;
    else if (c[0].id == c[1].id || c[0].id == c[2].id || c[1].id == c[2].id)
        return 0;
    else if (c->down == 2 && !picture->is_planes) {
        /* as libjpeg: chroma is not enlarged later, but reduced less here */
        c[1].side *= 2;
        c[2].side *= 2;
    } else if (c->across == 1 && picture->is_planes) /* chroma of full size */
        c[1].side = c[2].side = 8 / picture->chroma_factor;
    return 1;
}

/* Markers that tell the color space, and the ICC profile, of which libjpeg warns if it is bad. */
static int read_application(Picture *picture, int marker, const uint8_t *p, size_t size)
{
    if (marker == APP0 && size >= 5 && !memcmp(p, "JFIF", 5)) {
        picture->has_jfif = size >= 14 && p[5] == 1; /* version 1 */
        return picture->has_jfif;
    }
    if (marker == APP14 && size >= 5 && !memcmp(p, "Adobe", 5)) {
        picture->has_adobe = size >= 12 && p[11] == 1; /* YCbCr */
        return picture->has_adobe;
    }
    if (marker == APP2 && size >= 12 && !memcmp(p, "ICC_PROFILE", 12)) {
        if (size <= 14 || p[12] != 1 || p[13] != 1 || picture->has_profile) /* part 1 of 1 */
            return 0;
        picture->has_profile = 1;
    }
    return 1;
}

/* Sets where a component's coefficients are stored, and what they are multiplied by.

   A transform to 2x2 samples reads rows and columns 0 1 3 5 7 of a block. One to 4x4 samples reads
   0 1 2 3 5 6 7. Only these coefficients have slots. LANES is the order of columns in a row. A
   transform to 8x8 samples reads all, in their usual order. */
static void arrange(Component *c, const uint8_t *quantizer)
{
    static const uint8_t ZIGZAG[BLOCK] = {
        0, 1, 8, 16, 9, 2, 3, 10, 17, 24, 32, 25, 18, 11, 4, 5, 12, 19, 26, 33, 40, 48,
        41, 34, 27, 20, 13, 6, 7, 14, 21, 28, 35, 42, 49, 56, 57, 50, 43, 36, 29, 22, 15, 23,
        30, 37, 44, 51, 58, 59, 52, 45, 38, 31, 39, 46, 53, 60, 61, 54, 47, 55, 62, 63,
    };
    static const int LANES[8] = {0, 4, 2, 5, 1, 6, 3, 7};
    static const int ROWS[2][8] = {{0, 1, -1, 2, -1, 3, -1, 4}, {0, 1, 2, 3, -1, 4, 5, 6}};
    const int *rows = ROWS[c->side == 4];
    memset(c->slots, UNUSED_SLOT, sizeof c->slots);
    for (int i = 0; i < BLOCK; i++) {
        int row = rows[ZIGZAG[i] >> 3], column = ZIGZAG[i] & 7;
        if (c->side == 8)
            c->slots[i] = ZIGZAG[i];
        else if (row >= 0 && rows[column] >= 0)
            c->slots[i] = (uint8_t)(8 * row + LANES[column]);
        else
            continue;
        c->dequantizer.factors[c->slots[i]] = quantizer[i];
        c->dequantizer.limits[c->slots[i]] = (int16_t)(LARGEST / quantizer[i]);
    }
}

/* Takes the scan of a sequential file: all components, all coefficients. */
static int read_scan_header(Picture *picture, const uint8_t *p, size_t size)
{
    int count = picture->count;
    int is_ycc = count == 1 || picture->has_jfif || picture->has_adobe;
    if (!count || size != 4 + 2u * (unsigned)count || p[0] != count || p[size - 3] != 0
        || p[size - 2] != 63 || p[size - 1] != 0)
        return 0;
    p++;
    for (int i = 0; i < count; i++, p += 2) {
        Component *c = &picture->components[i];
        c->dc_table = p[1] >> 4;
        c->ac_table = p[1] & 15;
        /* without a marker of the color space, identifiers 1 2 3 mean YCbCr */
        if (p[0] != c->id || (!is_ycc && c->id != i + 1) || c->dc_table > 3 || c->ac_table > 3
            || !picture->dc[c->dc_table].defined || !picture->ac[c->ac_table].defined
            || !picture->quantizer_defined[c->quantizer])
            return 0;
        arrange(c, picture->quantizers[c->quantizer]);
        if (i == 2 && c->dc_table == c[-1].dc_table && c->ac_table == c[-1].ac_table)
            continue; /* as nearly always: both chromas have the same tables */
        build_dc_entries(&picture->dc[c->dc_table], picture->dc_entries[c->dc_table]);
        build_ac_entries(&picture->ac[c->ac_table], c->side > 1,
            picture->ac_entries[c->side > 1][c->ac_table]);
    }
    return 1;
}

/* Reads all segments up to the scan into `picture`, which is all zeros but for its factor. Returns
   the offset of the entropy-coded data, 0 for a file that is left to libjpeg. */
static size_t read_headers(Picture *picture, const uint8_t *data, size_t size)
{
    size_t offset = 2;
    if (size < 4 || data[0] != 0xff || data[1] != SOI)
        return 0;
    while (size - offset >= 4 && data[offset] == 0xff) {
        int marker = data[offset + 1], valid = 0;
        size_t length = (size_t)(data[offset + 2] << 8 | data[offset + 3]); /* with its two bytes */
        const uint8_t *p = data + offset + 4;
        if (length < 2 || length > size - offset - 2)
            return 0;
        offset += 2 + length;
        length -= 2;
        if (marker == SOS)
            return read_scan_header(picture, p, length) ? offset : 0;
        if (marker == DQT)
            valid = read_quantizers(picture, p, length);
        else if (marker == DHT)
            valid = read_huffman(picture, p, length);
        else if (marker == SOF0 || marker == SOF1)
            valid = read_frame(picture, p, length);
        else if (marker == DRI && length == 2) {
            picture->restart_interval = p[0] << 8 | p[1];
            valid = 1;
        } else if ((marker >= APP0 && marker <= APP15) || marker == COM)
            valid = read_application(picture, marker, p, length);
        if (!valid)
            return 0;
    }
    return 0;
}

#endif
