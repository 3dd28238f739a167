/* JPEGs decoded at 1/4 or 1/8 of their size. Most of the time of that goes into codes of coefficients
   that a reduced picture hardly needs, and that can be passed by several at a time.

   The pixels are those of libjpeg-turbo, bit for bit. Whatever is not a plain, whole baseline file
   gives None, and is libjpeg's to judge: nothing is accepted here that it would warn of.

   headers.h: the file up to its scan. entropy.h: bits to coefficients. pixels.h: coefficients to
   RGB. Here: the scan, a batch of MCUs at a time, and the module. */

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <stdlib.h>

#include "headers.h"

#define PADDING 16 /* zeros after the data */

typedef struct {
    const uint8_t *data; /* not yet copied into `clean` */
    size_t size;
    uint8_t *clean; /* a segment without stuffing, padded */
    size_t length;
    int mcus_left, restarts;
    Bits bits;
} Scan;

/* ---- the scan */

/* Copies the data up to the next marker. Returns 0 where none follows. */
static int unstuff(Scan *scan)
{
    const uint8_t *from = scan->data, *last = from + scan->size - 1; /* a marker has two bytes */
    uint8_t *to = scan->clean;
    while (scan->size && from < last) {
        const uint8_t *found = memchr(from, 0xff, (size_t)(last - from));
        if (!found)
            return 0;
        memcpy(to, from, (size_t)(found - from));
        to += found - from, from = found;
        if (from[1]) {
            scan->length = (size_t)(to - scan->clean);
            memset(to, 0, PADDING);
            scan->size -= (size_t)(from - scan->data), scan->data = from;
            scan->bits = (Bits){scan->clean, to + 8, 0, 0};
            return 1;
        }
        *to++ = 0xff, from += 2;
    }
    return 0;
}

/* Whether all of a segment was used, and nothing but padding bits is left of it. */
static int segment_is_used(const Scan *scan)
{
    size_t used = (size_t)(scan->bits.next - scan->clean) * 8 - scan->bits.left;
    return (used + 7) / 8 == scan->length;
}

static int restart(Picture *picture, Scan *scan)
{
    if (!segment_is_used(scan) || scan->data[1] != 0xd0 + (scan->restarts++ & 7))
        return 0;
    scan->data += 2, scan->size -= 2;
    scan->mcus_left = picture->restart_interval;
    for (int i = 0; i < picture->count; i++)
        picture->components[i].dc = 0;
    return unstuff(scan);
}

/* Differences of DC to DC. Returns whether it is out of range. Apart from the transforms, which read
   in wider pieces what is written here. */
static int add_up(Picture *picture, int mcus)
{
    unsigned range = 0;
    int16_t *block = picture->blocks;
    for (int n = 0; n < mcus; n++)
        for (Component *c = picture->components; c < picture->components + picture->count; c++)
            for (int i = c->across * c->down; i; i--, block += BLOCK) {
                c->dc += block[0];
                block[0] = (int16_t)c->dc;
                range |= (unsigned)c->dc + 2048;
            }
    return range >> 12 != 0;
}

static int transform_batch(const Picture *picture, const Component *c, int column, int count)
{
    int bad = 0;
    unsigned range = 0;
    const size_t side = (size_t)c->side, across = side * (size_t)c->across;
    uint8_t *out = c->rows + (size_t)column * across;
    const int16_t *block = picture->blocks + c->first_block * BLOCK;
    for (int n = 0; n < count; n++, out += across, block += picture->mcu_blocks * BLOCK)
        for (int i = 0; i < c->across * c->down; i++) {
            const int16_t *b = block + i * BLOCK;
            uint8_t *o = out + (size_t)(i & 1) * side + (size_t)(i >> 1) * side * c->stride;
            if (side == 4)
                bad |= transform_4(b, &c->scales, o, c->stride);
            else if (side == 2)
                bad |= transform_2(b, &c->scales, o, c->stride);
            else {
                *o = to_sample((b[0] * c->scales.quanta[0] + 4) >> 3, &range);
                bad |= range >> 10 != 0;
            }
        }
    return bad;
}

static int read_batch(Picture *picture, Bits *bits, int column, int count)
{
    const int blocks = count * picture->mcu_blocks;
    memset(picture->blocks, 0, (size_t)(blocks * BLOCK) * sizeof(int16_t));
    if (!read_blocks(bits, picture->steps, picture->steps + blocks, picture->blocks)
        || add_up(picture, count))
        return 0;
    for (int i = 0; i < picture->count; i++)
        if (transform_batch(picture, &picture->components[i], column, count))
            return 0;
    return 1;
}

static void write_row(const Picture *picture, size_t y, int width, uint8_t *wide, uint8_t *rgb)
{
    const Component *c = picture->components;
    const uint8_t *luma = c[0].rows + y * c[0].stride, *blue, *red;
    if (picture->count == 1) {
        for (int x = 0; x < width; x++)
            rgb[3 * x] = rgb[3 * x + 1] = rgb[3 * x + 2] = luma[x];
        return;
    }
    blue = c[1].rows + y * c[1].stride, red = c[2].rows + y * c[2].stride;
    if (c->across > c->down) {
        int half = divide_up(width, 2);
        widen(blue, half, wide, picture->factor == 4);
        widen(red, half, wide + 2 * half, picture->factor == 4);
        blue = wide, red = wide + 2 * half;
    }
    to_rgb(luma, blue, red, rgb, width);
}

/* Returns 0 for what is left to libjpeg. */
static int read_scan(Picture *picture, Scan *scan, uint8_t *wide, uint8_t *rgb)
{
    const Component *first = picture->components;
    const int columns = divide_up(picture->width, 8 * first->across);
    const int width = divide_up(picture->width, picture->factor);
    const int height = divide_up(picture->height, picture->factor);
    const int band = first->down * first->side;
    if (!unstuff(scan))
        return 0;
    scan->mcus_left = picture->restart_interval;
    for (int top = 0; top < height; top += band) {
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
        for (int y = 0; y < band && top + y < height; y++, rgb += 3 * (size_t)width)
            write_row(picture, (size_t)y, width, wide, rgb);
    }
    return segment_is_used(scan) && scan->data[1] == 0xd9;
}

static int decode(Picture *picture, const uint8_t *data, size_t size, uint8_t *rgb)
{
    const Component *first = picture->components;
    const size_t columns = (size_t)divide_up(picture->width, 8 * first->across);
    size_t wide = 2 * ((size_t)divide_up(picture->width, picture->factor) + 1) + STRIP, rows = 0;
    int blocks = 0;
    for (int i = 0; i < picture->count; i++) {
        Component *c = &picture->components[i];
        c->first_block = blocks;
        for (int j = c->across * c->down; j--; blocks++)
            picture->steps[blocks] = (Step){&picture->dc[c->dc_table], &picture->ac[c->ac_table],
                picture->dc_entries[c->dc_table], picture->ac_entries[c->side > 1][c->ac_table],
                c->slots};
        c->stride = columns * (size_t)(c->across * c->side);
        rows += c->stride * (size_t)(c->down * c->side);
    }
    picture->mcu_blocks = blocks;
    for (int i = blocks; i <= BATCH * blocks; i++)
        picture->steps[i] = picture->steps[i - blocks];
    uint8_t *memory = malloc(wide + rows + STRIP + size + PADDING);
    if (!memory)
        return 0;
    uint8_t *at = memory + wide;
    for (int i = 0; i < picture->count; i++) {
        Component *c = &picture->components[i];
        c->rows = at, at += c->stride * (size_t)(c->down * c->side);
    }
    Scan scan = {.data = data, .size = size, .clean = at + STRIP};
    int good = read_scan(picture, &scan, memory, rgb);
    free(memory);
    return good;
}

/* ---- Python */

static PyObject *decode_bytes(PyObject *bytes, int factor, Picture *picture)
{
    const uint8_t *data = (const uint8_t *)PyBytes_AS_STRING(bytes);
    size_t size = (size_t)PyBytes_GET_SIZE(bytes), start;
    int good, width, height;
    picture->factor = factor;
    Py_BEGIN_ALLOW_THREADS
    start = read_headers(picture, data, size);
    Py_END_ALLOW_THREADS
    if (!start)
        Py_RETURN_NONE;
    width = divide_up(picture->width, factor), height = divide_up(picture->height, factor);
    PyObject *pixels = PyByteArray_FromStringAndSize(NULL, (Py_ssize_t)width * height * 3);
    if (!pixels)
        return NULL;
    uint8_t *rgb = (uint8_t *)PyByteArray_AS_STRING(pixels);
    Py_BEGIN_ALLOW_THREADS
    good = decode(picture, data + start, size - start, rgb);
    Py_END_ALLOW_THREADS
    if (good)
        return Py_BuildValue("Nii", pixels, height, width);
    Py_DECREF(pixels);
    Py_RETURN_NONE;
}

static PyObject *decode_reduced(PyObject *module, PyObject *args)
{
    PyObject *bytes; /* and no other buffer: what is checked must not change before it is used */
    int factor;
    (void)module;
    if (!PyArg_ParseTuple(args, "Si", &bytes, &factor))
        return NULL;
    PyObject *result = NULL;
    Picture *picture = calloc(1, sizeof *picture);
    if (!picture)
        PyErr_NoMemory();
    else if (factor != 4 && factor != 8)
        PyErr_SetString(PyExc_ValueError, "factor is 4 or 8");
    else
        result = decode_bytes(bytes, factor, picture);
    free(picture);
    return result;
}

static PyMethodDef methods[] = {
    {"decode_reduced", decode_reduced, METH_VARARGS,
        "decode_reduced(data, factor) -> (pixels, height, width), or None for libjpeg to judge."},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, .m_name = "_reduced", .m_size = 0, .m_methods = methods};

PyMODINIT_FUNC PyInit__reduced(void)
{
    fill_samples();
    return PyModuleDef_Init(&definition);
}
