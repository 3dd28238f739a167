/* Decodes one input with the C JPEG decoder, in heap blocks of exactly the right size.

   This is the fuzz target. fuzz_jpeg.c calls it with mutated files. LibFuzzer can call it, too.

   A harness has to show that it can fail. So the environment variable PLANTED_BUG adds a bug to
   this file. "overwrite", "undefined" and "hang" need a mutation: no stored file sets them off.

     overread   the last byte of the input lies outside its block
     overwrite  the output of a high picture is larger than its block
     undefined  a shift by more than 31 bits
     unwritten  a pixel comes from memory that was never written
     leak       the input is not freed
     hang       a file of five Huffman tables is never done */

#include "fuzz_jpeg_target.h"

#include "../../mmstream/csrc/planes.h"

/* Larger pictures are not decoded, as in the product, which checks the size first. */
#define MAX_PIXELS (1 << 22)

Outcomes outcomes;

static int has_planted_bug(const char *name)
{
    const char *planted = getenv("PLANTED_BUG");
    return planted && !strcmp(planted, name);
}

static void add_to_checksum(uint64_t value)
{
    outcomes.checksum = (outcomes.checksum ^ value) * 0x9e3779b97f4a7c15u;
    outcomes.checksum ^= outcomes.checksum >> 32;
}

static void decode_at(const uint8_t *data, size_t size, int factor)
{
    Picture *picture = calloc(1, sizeof *picture);
    if (!picture)
        return;
    picture->factor = factor;
    const size_t start = read_headers(picture, data, size);
    if (has_planted_bug("undefined"))
        picture->num_tables += 1 << picture->restart_interval;
    while (has_planted_bug("hang") && picture->num_tables == 5)
        outcomes.checksum++;
    if (start && (size_t)picture->width * (size_t)picture->height <= MAX_PIXELS) {
        const size_t width = (size_t)divide_up(picture->width, factor);
        const size_t height = (size_t)divide_up(picture->height, factor);
        size_t count = 3 * width * height;
        if (has_planted_bug("overwrite") && picture->height >= 1536)
            count = 3 * width - 1;
        uint8_t *rgb = malloc(count);
        const int accepted = rgb && decode(picture, data + start, size - start, rgb);
        if (has_planted_bug("unwritten") && accepted) {
            uint8_t *unwritten = malloc(1);
            rgb[0] = *unwritten;
            free(unwritten);
        }
        add_to_checksum((uint64_t)accepted);
        outcomes.pictures += accepted;
        for (size_t i = 0; accepted && i < count; i++)
            add_to_checksum(rgb[i]);
        free(rgb);
    }
    free(picture);
}

/* Decodes to planes of some eighths of the decoded height and width, rounded up. */
static void decode_planes_at(
    const uint8_t *data, size_t size, int factor, int height_eighths, int width_eighths)
{
    Picture *picture = calloc(1, sizeof *picture);
    if (!picture)
        return;
    picture->factor = factor;
    picture->chroma_factor = 2;
    picture->is_planes = 1;
    const size_t start = read_headers(picture, data, size);
    if (start && (size_t)picture->width * (size_t)picture->height <= MAX_PIXELS) {
        const int height = divide_up(divide_up(picture->height, factor) * height_eighths, 8);
        const int width = divide_up(divide_up(picture->width, factor) * width_eighths, 8);
        Plane planes[3] = {0};
        size_planes(picture, height, width, planes);
        for (int i = 0; i < picture->count; i++)
            planes[i].samples = malloc(plane_size(&planes[i]));
        const int accepted
            = decode_planes(picture, data + start, size - start, height, width, planes);
        add_to_checksum((uint64_t)accepted);
        outcomes.pictures += accepted;
        for (int i = 0; i < picture->count; i++) {
            for (size_t n = 0; accepted && n < plane_size(&planes[i]); n++)
                add_to_checksum(planes[i].samples[n]);
            free(planes[i].samples);
        }
    }
    free(picture);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    if (!SAMPLES[1023])
        fill_samples();
    size_t copied = size;
    if (has_planted_bug("overread") && size)
        copied--;
    uint8_t *copy = malloc(copied);
    if (!copy)
        return 0;
    memcpy(copy, data, copied);
    decode_at(copy, size, 4);
    decode_at(copy, size, 8);
    decode_planes_at(copy, size, 1, 4, 3);
    decode_planes_at(copy, size, 2, 5, 4);
    if (!has_planted_bug("leak"))
        free(copy);
    return 0;
}
