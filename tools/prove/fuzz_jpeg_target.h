/* The fuzz target (fuzz_jpeg_target.c), for the driver (fuzz_jpeg.c). */

#ifndef FUZZ_JPEG_TARGET_H
#define FUZZ_JPEG_TARGET_H

#include <stddef.h>
#include <stdint.h>

typedef struct {
    unsigned long pictures; /* that the decoder accepted, at 1/4 and 1/8 and as planes */
    uint64_t checksum;      /* of all their pixels, and of which files were accepted */
} Outcomes;

extern Outcomes outcomes;

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

#endif
