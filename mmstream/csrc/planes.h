/* A JPEG made smaller without RGB: each component is decoded and resized on its own.

   Chroma becomes half as high and half as wide as luma (4:2:0), whatever it was. Rows are resized
   as soon as their MCUs are decoded. So memory holds a few rows of the file's picture. Call
   read_headers() first, with `is_planes` set, and then decode_planes(). */

#ifndef PLANES_H
#define PLANES_H

#include "decode.h"
#include "filter.h"

/* One component of the result, and what is needed to make it. */
typedef struct {
    int height, width; /* of the result */
    uint8_t *samples;  /* of the result, given by the caller */
    size_t stride;     /* of the result: `width`, or 1 more to be even */
    int in_height, in_width;
    Filter down, across;
    uint8_t *ring;   /* the last `ring_rows` decoded rows: row y lies at y % ring_rows */
    int ring_rows;   /* a multiple of the rows of an MCU */
    const uint8_t **taps;
    int16_t *row;    /* one row, resized to its new height only */
    int next;        /* the next row of the result */
} Plane;

/* The bytes of `samples`. libjpeg reads luma in pairs of rows and columns, so their number is
   even. */
static size_t plane_size(const Plane *plane)
{
    return plane->stride * (size_t)(plane->height + (plane->height & 1));
}

/* Sets the sizes of the planes of a picture of `height` x `width`.

   Example: 641 columns of luma, at full size, have 320.5 columns of chroma in 4:2:0. That is 321
   samples, of which the last one is half outside. */
static void size_planes(const Picture *picture, int height, int width, Plane *planes)
{
    const Component *first = picture->components;
    for (int i = 0; i < picture->count; i++) {
        const Component *c = &picture->components[i];
        Plane *plane = &planes[i];
        plane->height = i ? divide_up(height, 2) : height;
        plane->width = i ? divide_up(width, 2) : width;
        plane->stride = (size_t)(plane->width + (plane->width & 1));
        plane->in_height = divide_up(picture->height * c->side * c->down, 8 * first->down);
        plane->in_width = divide_up(picture->width * c->side * c->across, 8 * first->across);
    }
}

/* Returns how many decoded samples one sample of the plane covers along an axis.

   Example: 641 columns become 300. Those of chroma, 320.5, become 150. The scale is 641 / 300 for
   both. */
static double scale_of(int size, double samples_per_8, int out_size, int is_chroma)
{
    return size * samples_per_8 / 8 * (is_chroma ? 2 : 1) / out_size;
}

static int make_plane(const Picture *picture, int i, int height, int width, Plane *plane)
{
    const Component *first = picture->components, *c = first + i;
    const double down = (double)(c->side * c->down) / first->down;
    const double across = (double)(c->side * c->across) / first->across;
    if (!make_filter(&plane->down, plane->in_height, plane->height,
            scale_of(picture->height, down, height, i))
        || !make_filter(&plane->across, plane->in_width, plane->width,
            scale_of(picture->width, across, width, i)))
        return 0;
    const int band = rows_of_mcu(c);
    plane->ring_rows = (divide_up(plane->down.taps, band) + 1) * band;
    plane->ring = malloc((size_t)plane->ring_rows * c->stride);
    plane->taps = malloc((size_t)plane->down.taps * sizeof *plane->taps);
    plane->row = calloc((size_t)(plane->in_width + plane->across.taps), sizeof *plane->row);
    return plane->ring && plane->taps && plane->row;
}

static void free_plane(Plane *plane)
{
    free_filter(&plane->down);
    free_filter(&plane->across);
    free(plane->ring);
    free(plane->taps);
    free(plane->row);
}

/* Makes all rows of the result for which `rows` decoded rows are enough. */
static void write_rows(Plane *plane, size_t in_stride, int rows)
{
    const Filter *down = &plane->down;
    const int last = plane->in_height - 1;
    for (; plane->next < plane->height; plane->next++) {
        const int start = down->starts[plane->next];
        if (rows <= last && start + down->taps > rows)
            return;
        for (int t = 0; t < down->taps; t++) {
            int y = start + t < last ? start + t : last;
            plane->taps[t] = plane->ring + (size_t)(y % plane->ring_rows) * in_stride;
        }
        uint8_t *out = plane->samples + (size_t)plane->next * plane->stride;
        sum_rows(plane->taps, down, plane->next, plane->in_width, plane->row);
        resize_row(plane->row, &plane->across, plane->width, out);
        out[plane->stride - 1] = out[plane->width - 1];
        if (plane->next == plane->height - 1 && plane->height & 1)
            memcpy(out + plane->stride, out, plane->stride);
    }
}

static int read_planes(Picture *picture, Scan *scan, Plane *planes)
{
    const int bands = divide_up(picture->height, 8 * picture->components->down);
    if (!begin_scan(picture, scan))
        return 0;
    for (int n = 0; n < bands; n++) {
        for (int i = 0; i < picture->count; i++) {
            Component *c = &picture->components[i];
            c->rows = planes[i].ring + (size_t)(n * rows_of_mcu(c) % planes[i].ring_rows) * c->stride;
        }
        if (!read_band(picture, scan))
            return 0;
        for (int i = 0; i < picture->count; i++) {
            const Component *c = &picture->components[i];
            write_rows(&planes[i], c->stride, (n + 1) * rows_of_mcu(c));
        }
    }
    return is_end(scan);
}

/* Decodes the entropy-coded `data` and resizes it to `height` x `width`, no more than the decoded
   picture. size_planes() has set the sizes of `planes`, and the caller their samples, of
   plane_size(). Returns 1 if the planes hold the picture, 0 for a file that is left to libjpeg or
   without memory. */
static int decode_planes(
    Picture *picture, const uint8_t *data, size_t size, int height, int width, Plane *planes)
{
    Scan scan = {.data = data, .size = size, .clean = malloc(size + PADDING)};
    int accepted = scan.clean != NULL;
    arrange_mcus(picture);
    for (int i = 0; i < picture->count && accepted; i++)
        accepted = make_plane(picture, i, height, width, &planes[i]);
    accepted = accepted && read_planes(picture, &scan, planes);
    for (int i = 0; i < picture->count; i++)
        free_plane(&planes[i]);
    free(scan.clean);
    return accepted;
}

#endif
