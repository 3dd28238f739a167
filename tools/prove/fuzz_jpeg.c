/* The fuzzing driver: mutates JPEG files and gives them to the target.

     fuzz_jpeg SECONDS INPUTS SEED FAILURE FILE...

   It first decodes every FILE as it is. Then it decodes mutated files, for SECONDS or until it has
   decoded INPUTS in all, whichever comes first. Equal SEEDs give equal inputs in equal order. So
   the checksums of two builds can be compared if both decode the same number of inputs.

   There is no feedback of code coverage. It was tried: random mutations reach the same code.

   When an input crashes the target or takes too long, the driver writes it to the file FAILURE and
   ends with an error. Sanitizers have to be told to abort: see fuzz_jpeg.sh. */

#define _GNU_SOURCE
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

#include "fuzz_jpeg_target.h"

#define MAX_SIZE (1 << 14) /* of an input; larger seed files are left out, as they are slow */
#define MAX_SEEDS 4096
#define MAX_SEGMENTS 64
#define TIME_LIMIT 3 /* seconds of processor time for an input, rounded down by up to one */

typedef struct {
    size_t size;
    uint8_t *data;
} Input;

static Input seeds[MAX_SEEDS];
static unsigned long num_seeds;
static uint8_t buffer[MAX_SIZE]; /* the present input */
static size_t buffer_size;

/* ---- random numbers: xorshift64* (Vigna, 2016) */

static uint64_t random_state;

static size_t below(size_t limit)
{
    random_state ^= random_state >> 12;
    random_state ^= random_state << 25;
    random_state ^= random_state >> 27;
    return (size_t)((random_state * 0x2545f4914f6cdd1du) >> 33) % limit;
}

/* Returns a byte; one in two is a value at some limit of the format. */
static uint8_t random_byte(void)
{
    static const uint8_t LIMITS[] = {
        0, 1, 2, 3, 4, 7, 8, 10, 11, 12, 15, 16, 17, 23, 24, 25, 32, 63, 64, 127, 128, 254, 255};
    return below(2) ? LIMITS[below(sizeof LIMITS)] : (uint8_t)below(256);
}

/* ---- failures */

static const char *failure_path;
static volatile sig_atomic_t ticks;

static void save_failure(const char *message)
{
    const int file = open(failure_path, O_WRONLY | O_CREAT | O_TRUNC, 0644);
    if (file < 0 || write(file, buffer, buffer_size) < 0)
        message = "the failing input could not be saved\n";
    if (write(STDERR_FILENO, message, strlen(message)) < 0)
        _exit(4);
}

static void on_abort(int number)
{
    save_failure("FAILED: the decoder failed; the present input is saved\n");
    signal(number, SIG_DFL);
}

static void on_tick(int number)
{
    (void)number;
    if (++ticks <= TIME_LIMIT)
        return;
    save_failure("FAILED: an input takes too long; it is saved\n");
    _exit(3);
}

static void watch(void)
{
    const struct itimerval second = {{1, 0}, {1, 0}};
    signal(SIGABRT, on_abort);
    signal(SIGPROF, on_tick);
    setitimer(ITIMER_PROF, &second, NULL);
}

/* ---- mutations

   A file is the marker SOI, then segments (0xff, marker, two bytes of length, content), then
   entropy-coded data. Mutations know where these begin. They work on damaged files, too. */

typedef struct {
    int count;
    size_t starts[MAX_SEGMENTS + 1]; /* the last one is the start of the entropy-coded data */
} Layout;

static Layout find_layout(void)
{
    Layout layout = {0};
    size_t offset = 2;
    while (layout.count < MAX_SEGMENTS && offset + 4 <= buffer_size && buffer[offset] == 0xff) {
        const int is_scan = buffer[offset + 1] == 0xda;
        const size_t length = (size_t)(buffer[offset + 2] << 8 | buffer[offset + 3]);
        if (offset + 2 + length > buffer_size)
            break;
        layout.starts[layout.count++] = offset;
        offset += 2 + length;
        if (is_scan)
            break;
    }
    layout.starts[layout.count] = offset < buffer_size ? offset : buffer_size;
    return layout;
}

/* Returns the start of a random segment with this marker, 0 if there is none. */
static size_t find_segment(const Layout *layout, int marker)
{
    const int first = layout->count ? (int)below((size_t)layout->count) : 0;
    for (int i = 0; i < layout->count; i++) {
        const size_t start = layout->starts[(first + i) % layout->count];
        if (buffer[start + 1] == marker)
            return start;
    }
    return 0;
}

static size_t segment_size(size_t start)
{
    return 2 + (size_t)(buffer[start + 2] << 8 | buffer[start + 3]);
}

/* Replaces `removed` bytes at `offset` by `count` others; does nothing where that does not fit. */
static void replace(size_t offset, size_t removed, const uint8_t *bytes, size_t count)
{
    static uint8_t copy[MAX_SIZE]; /* `bytes` may lie in the buffer */
    if (offset + removed > buffer_size || buffer_size - removed + count > MAX_SIZE)
        return;
    if (count)
        memcpy(copy, bytes, count);
    memmove(buffer + offset + count, buffer + offset + removed, buffer_size - offset - removed);
    memcpy(buffer + offset, copy, count);
    buffer_size += count - removed;
}

static void change_bytes(size_t start, size_t end)
{
    if (start >= end)
        return;
    for (size_t n = 1 + below(4); n; n--) {
        uint8_t *byte = buffer + start + below(end - start);
        switch (below(3)) {
        case 0: *byte ^= (uint8_t)(1u << below(8)); break;
        case 1: *byte = random_byte(); break;
        default: *byte = (uint8_t)(*byte + below(9) - 4);
        }
    }
}

static void change_segments(const Layout *layout)
{
    if (!layout->count)
        return;
    const size_t start = layout->starts[below((size_t)layout->count)], size = segment_size(start);
    const size_t to = layout->starts[below((size_t)layout->count)];
    switch (below(4)) {
    case 0: replace(start, size, NULL, 0); break;
    case 1: replace(to, 0, buffer + start, size); break;
    case 2: /* its length */
        buffer[start + 2 + below(2)] = random_byte();
        break;
    default: /* its content, cut or repeated, with the right length */
        if (size > 5) {
            const size_t part = 1 + below(size - 4);
            if (below(2))
                replace(start + size - part, part, NULL, 0);
            else
                replace(start + size, 0, buffer + start + size - part, part);
            const size_t length = (below(2) ? size - part : size + part) - 2;
            buffer[start + 2] = (uint8_t)(length >> 8);
            buffer[start + 3] = (uint8_t)length;
        }
    }
}

/* Moves codes of a Huffman table from one length to another, or changes symbols. */
static void change_huffman(const Layout *layout)
{
    const size_t start = find_segment(layout, 0xc4), size = start ? segment_size(start) : 0;
    if (size < 21)
        return;
    uint8_t *counts = buffer + start + 5, *from = counts + below(16), *to = counts + below(16);
    const uint8_t moved = (uint8_t)below((size_t)*from + 1);
    switch (below(4)) {
    case 0:
        *from = (uint8_t)(*from - moved);
        *to = (uint8_t)(*to + moved);
        break;
    case 1: *to = random_byte(); break;
    case 2: buffer[start + 4] = random_byte(); break; /* class and number of the table */
    default: change_bytes(start + 21, start + size);
    }
}

static void change_quantizer(const Layout *layout)
{
    const size_t start = find_segment(layout, 0xdb), size = start ? segment_size(start) : 0;
    if (size < 5)
        return;
    if (below(4))
        change_bytes(start + 5, start + size);
    else
        buffer[start + 4] = random_byte(); /* precision and number of the table */
}

static void change_frame(const Layout *layout)
{
    const size_t start = find_segment(layout, 0xc0), size = start ? segment_size(start) : 0;
    if (size < 13)
        return;
    switch (below(4)) {
    case 0: /* a low byte of height or width */
        buffer[start + 6 + 2 * below(2)] = random_byte();
        break;
    case 1: /* a high byte of them */
        buffer[start + 5 + 2 * below(2)] = (uint8_t)below(8);
        break;
    case 2: /* sampling factors of a component */
        if (size >= 19)
            buffer[start + 11 + 3 * below(3)] = (uint8_t)(below(4) << 4 | below(4));
        break;
    default: change_bytes(start + 1, start + size);
    }
}

static void change_scan_header(const Layout *layout)
{
    const size_t start = find_segment(layout, 0xda);
    if (start)
        change_bytes(start + 4, start + segment_size(start));
}

static void change_restart_interval(const Layout *layout)
{
    const size_t start = find_segment(layout, 0xdd);
    const uint8_t segment[6] = {
        0xff, 0xdd, 0, 4, below(8) ? 0 : random_byte(), (uint8_t)below(below(2) ? 8 : 256)};
    if (start)
        memcpy(buffer + start, segment, segment_size(start) == 6 ? 6 : 4);
    else
        replace(2, 0, segment, sizeof segment);
}

static void change_entropy(size_t start)
{
    if (start >= buffer_size)
        return;
    const size_t offset = start + below(buffer_size - start), rest = buffer_size - offset;
    const size_t count = 1 + below(rest < 32 ? rest : 32);
    const uint8_t marker[2] = {0xff, (uint8_t)(below(4) ? 0xd0 + below(10) : below(256))};
    switch (below(5)) {
    case 0: change_bytes(start, buffer_size); break;
    case 1: replace(offset, below(2) ? 2 : 0, marker, 2); break;
    case 2: replace(offset, count, NULL, 0); break;
    case 3: replace(start + below(buffer_size - start), 0, buffer + offset, count); break;
    default:
        for (size_t i = 0; i < count; i++)
            buffer[offset + i] = (uint8_t)below(256);
    }
}

/* Replaces the rest of the input, or one segment, by that of another file. */
static void cross(const Layout *layout)
{
    const Input *other = &seeds[below(num_seeds)];
    if (!layout->count || other->size < 8)
        return;
    const size_t start = layout->starts[below((size_t)layout->count + 1)];
    const size_t from = 2 + below(other->size - 2);
    for (size_t i = from; i + 4 < other->size; i++)
        if (other->data[i] == 0xff && other->data[i + 1] >= 0xc0) {
            const size_t size = 2 + (size_t)(other->data[i + 2] << 8 | other->data[i + 3]);
            if (below(3) == 0)
                replace(start, buffer_size - start, other->data + i, other->size - i);
            else if (i + size <= other->size)
                replace(start, start < layout->starts[layout->count] && below(2)
                        ? segment_size(start) : 0, other->data + i, size);
            return;
        }
}

static void mutate(void)
{
    const Layout layout = find_layout();
    const size_t entropy = layout.starts[layout.count];
    switch (below(12)) {
    case 0: change_bytes(0, buffer_size); break;
    case 1: change_bytes(2, entropy); break;
    case 2: change_segments(&layout); break;
    case 3: change_huffman(&layout); break;
    case 4: change_quantizer(&layout); break;
    case 5: change_frame(&layout); break;
    case 6: change_scan_header(&layout); break;
    case 7: change_restart_interval(&layout); break;
    case 8: /* cut anywhere, with an end marker or without */
        if (buffer_size > 4)
            buffer_size -= below(below(2) ? 4 : buffer_size - 3);
        if (below(2))
            replace(buffer_size, 0, (const uint8_t *)"\xff\xd9", 2);
        break;
    case 9: cross(&layout); break;
    default: change_entropy(entropy);
    }
}

/* ---- the loop */

static void read_seed(const char *path)
{
    static uint8_t bytes[MAX_SIZE + 1];
    FILE *file = fopen(path, "rb");
    if (!file) {
        perror(path);
        exit(2);
    }
    const size_t size = fread(bytes, 1, sizeof bytes, file);
    fclose(file);
    if (size > MAX_SIZE || !size)
        return;
    if (num_seeds == MAX_SEEDS) {
        fprintf(stderr, "more than %d seed files\n", MAX_SEEDS);
        exit(2);
    }
    uint8_t *data = malloc(size);
    if (!data)
        exit(2);
    memcpy(data, bytes, size);
    seeds[num_seeds++] = (Input){size, data};
}

static void load(const Input *seed)
{
    buffer_size = seed->size;
    memcpy(buffer, seed->data, buffer_size);
}

static double now(void)
{
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (double)time.tv_sec + (double)time.tv_nsec / 1e9;
}

int main(int argc, char **argv)
{
    if (argc < 6) {
        fprintf(stderr, "usage: fuzz_jpeg SECONDS INPUTS SEED FAILURE FILE...\n");
        return 2;
    }
    const double seconds = strtod(argv[1], NULL), start = now();
    const unsigned long inputs = strtoul(argv[2], NULL, 10);
    random_state = strtoull(argv[3], NULL, 10) * 0x9e3779b97f4a7c15u + 1;
    failure_path = argv[4];
    for (int i = 5; i < argc; i++)
        read_seed(argv[i]);
    if (!num_seeds) {
        fprintf(stderr, "no seed file of at most %d bytes\n", MAX_SIZE);
        return 2;
    }
    watch();
    unsigned long count = 0;
    while (count < num_seeds || (count < inputs && now() - start < seconds)) {
        if (count < num_seeds)
            load(&seeds[count]);
        else {
            load(&seeds[below(num_seeds)]);
            for (size_t n = 1 + below(4); n; n--)
                mutate();
        }
        ticks = 0;
        LLVMFuzzerTestOneInput(buffer, buffer_size);
        count++;
    }
    const double busy = (double)clock() / CLOCKS_PER_SEC;
    printf("inputs %lu\nseconds %.1f\ninputs per processor second %.0f\npictures %lu\n"
           "checksum %016llx\n",
        count, now() - start, (double)count / busy, outcomes.pictures,
        (unsigned long long)outcomes.checksum);
    return 0;
}
