/* Entropy-coded JPEG data to the coefficients that a reduced picture needs, several symbols a
   look-up. Included by reduced.c alone. */

#ifndef ENTROPY_H
#define ENTROPY_H

#include <stdint.h>
#include <string.h>

#define CODE_BITS 9
#define BLOCK 64
#define INDEX_BITS 11 /* at most: a first value has ten bits in its entry */
#define OVER 128      /* added to how far an entry advances: the block ends */
#define UNKNOWN 192   /* in its place: a code too long for the index, or none at all */
#define NOWHERE 64    /* a place that SPARE stands for */
#define SPARE 63      /* a slot of a block that no transform reads */

/* ---- codes, in the order of their length */

typedef struct {
    int defined;
    uint32_t limit[17]; /* by length: the first 16 bits that are no code so short */
    int offset[17];     /* by length: from a code to its symbol */
    uint8_t symbols[256];
    uint16_t codes[1 << CODE_BITS]; /* length << 8 | symbol; 0 for longer codes */
} Huffman;

static unsigned long_code(const Huffman *table, unsigned next16)
{
    for (int length = 1; length <= 16; length++)
        if (next16 < table->limit[length]) {
            int index = table->offset[length] + (int)(next16 >> (16 - length));
            return (unsigned)length << 8 | table->symbols[index];
        }
    return 0;
}

/* Returns length << 8 | symbol of the code that these 16 bits begin with, 0 for none. */
static inline unsigned find_code(const Huffman *table, unsigned next16)
{
    unsigned code = table->codes[next16 >> (16 - CODE_BITS)];
    return code ? code : long_code(table, next16);
}

static int define_huffman(Huffman *table, const uint8_t *counts, const uint8_t *symbols)
{
    uint32_t code = 0;
    int index = 0;
    for (int length = 1; length <= 16; length++) {
        table->offset[length] = index - (int)code;
        code += counts[length - 1];
        index += counts[length - 1];
        if (code >= 1u << length) /* no code is all ones */
            return 0;
        table->limit[length] = code << (16 - length);
        code <<= 1;
    }
    memcpy(table->symbols, symbols, (size_t)index);
    for (unsigned i = 0; i < 1 << CODE_BITS; i++) {
        unsigned found = long_code(table, i << (16 - CODE_BITS));
        table->codes[i] = found >> 8 <= CODE_BITS ? (uint16_t)found : 0;
    }
    table->defined = 1;
    return 1;
}

/* ---- bits: 56 or more after a refill, which reads eight bytes */

typedef struct {
    const uint8_t *next, *stop; /* from `stop` on all is beyond the data, and zero */
    uint64_t buffer;            /* left-justified */
    uint64_t left;
} Bits;

static inline void refill(Bits *bits)
{
    const uint8_t *p = bits->next;
    uint64_t word = (uint64_t)p[0] << 56 | (uint64_t)p[1] << 48 | (uint64_t)p[2] << 40
        | (uint64_t)p[3] << 32 | (uint64_t)p[4] << 24 | (uint64_t)p[5] << 16 | (uint64_t)p[6] << 8
        | (uint64_t)p[7];
    bits->buffer |= word >> bits->left;
    bits->next += (63 - bits->left) >> 3;
    bits->next = bits->next < bits->stop ? bits->next : bits->stop;
    bits->left |= 56;
}

static inline void drop(Bits *bits, unsigned count)
{
    bits->buffer <<= count;
    bits->left -= count;
}

/* The value that `size` bits stand for: without the highest bit it is negative. */
static inline int extend(unsigned bits, unsigned size)
{
    return size && !(bits >> (size - 1)) ? (int)bits - (1 << size) + 1 : (int)bits;
}

static inline unsigned top(uint64_t buffer, unsigned count)
{
    return (unsigned)(buffer >> 1 >> (63 - count));
}

/* ---- entries of tables that the next bits are an index of: the bits to drop, how many places of a
   block to advance, and up to two values with their places from the present one. The last value may
   reach past the index; the bits beyond it, shifted down, are added to its base.

   bits | advance << 8 | places << 16 and 24 | shift << 32 | first << 38 | base of the last << 48 */

static uint64_t pack(unsigned bits, unsigned advance, const unsigned places[2], unsigned shift,
    int first, int last)
{
    return bits | advance << 8 | places[0] << 16 | (uint64_t)places[1] << 24
        | (uint64_t)shift << 32 | (uint64_t)(first & 1023) << 38 | (uint64_t)(uint16_t)last << 48;
}

/* Sets the base of a value of which at least one bit is inside the index, and returns its shift. */
static unsigned begin_value(unsigned rest, unsigned inside, unsigned size, int *base)
{
    unsigned known = size < inside ? size : inside, beyond = size - known;
    *base = extend((rest >> (16 - known)) << beyond, size);
    return 63 - beyond;
}

static void build_dc(const Huffman *table, uint64_t *entries)
{
    for (unsigned i = 0; i < 1 << INDEX_BITS; i++) {
        unsigned rest = i << (16 - INDEX_BITS), code = find_code(table, rest);
        unsigned length = code >> 8, size = code & 255, shift = 63, places[2] = {NOWHERE};
        int base = 0;
        int known = code && length + (size > 0) <= INDEX_BITS;
        if (known && size)
            shift = begin_value(rest << length & 0xffff, INDEX_BITS - length, size, &base);
        places[1] = known ? 0 : NOWHERE;
        entries[i] = pack(known ? length + size : 0, known ? 1 : UNKNOWN, places, shift, 0, base);
    }
}

/* As many coefficients as an index holds; of those that are wanted, up to two. */
static void build_ac(const Huffman *table, int wanted, uint64_t *entries)
{
    for (unsigned i = 0; i < 1 << INDEX_BITS; i++) {
        unsigned bits = 0, advance = 0, found = 0, shift = 63;
        unsigned places[2] = {NOWHERE, NOWHERE};
        int first = 0, last = 0;
        while (bits < INDEX_BITS) {
            unsigned rest = i << bits << (16 - INDEX_BITS) & 0xffff, code = find_code(table, rest);
            unsigned length = code >> 8, run = code >> 4 & 15, size = code & 15;
            unsigned inside = INDEX_BITS - bits - length;
            if (!code || length > INDEX_BITS - bits || size > 10 || (!size && run % 15))
                break;
            if (!size && !run) {
                bits += length;
                advance |= OVER;
                break;
            }
            if (advance + run + 1 > 63 || (wanted && size && (found == 2 || !inside)))
                break;
            if (wanted && size) {
                places[0] = places[1], first = last;
                places[1] = advance + run;
                shift = begin_value(rest << length & 0xffff, inside, size, &last);
                found++;
            }
            bits += length + size;
            advance += run + 1;
        }
        entries[i] = pack(bits, advance ? advance : UNKNOWN, places, shift, first, last);
    }
}

/* ---- blocks */

typedef struct {
    const Huffman *dc_table, *ac_table;
    const uint64_t *dc, *ac;
    const uint8_t *slots; /* by place in zigzag order: where in a block a coefficient goes */
} Step;

/* Reads one symbol, plainly. Returns the place after it, 64 where the block ends, 0 if it is bad. */
static inline unsigned read_symbol(
    Bits *bits, const Step *step, unsigned place, unsigned *at, int *value)
{
    unsigned code, run, size;
    refill(bits);
    code = find_code(place ? step->ac_table : step->dc_table, (unsigned)(bits->buffer >> 48));
    run = code >> 4 & 15, size = code & 15;
    *at = NOWHERE, *value = 0;
    if (!code || size > 10u + !place || (place && !size && run % 15))
        return 0;
    drop(bits, code >> 8);
    if (place && !size && !run)
        return 64;
    if (place + run + 1 > 64)
        return 0;
    if (size)
        *at = place + run, *value = extend(top(bits->buffer, size), size);
    drop(bits, size);
    return place + run + 1;
}

/* Goes on where an entry does not lead: it knows nothing, or the block ends among its symbols, whose
   values are stored already. */
static unsigned read_plainly(Bits *bits, const Step *step, unsigned place, int known, int16_t *block)
{
    int value;
    unsigned at;
    do {
        place = read_symbol(bits, step, place, &at, &value);
        if (place && !known)
            block[step->slots[at]] = (int16_t)value;
    } while (known && place && place < 64);
    return place;
}

/* Reads blocks into zeros, in place of DC its differences. Returns 0 for a bad code.

   Nobody can predict where a block ends, so that is no branch: the next entry comes from one table
   or from the other. */
static int read_blocks(Bits *bits, const Step *step, const Step *end, int16_t *block)
{
    unsigned place = 0;
    const uint64_t *entries = step->dc;
    Bits b = {bits->next, bits->stop, bits->buffer, bits->left};
    for (unsigned turn = 0; step < end; turn++) {
        if (!(turn & 1))
            refill(&b);
        const Bits before = b;
        const uint64_t entry = entries[b.buffer >> (64 - INDEX_BITS)];
        const uint8_t *slots = step->slots + place;
        unsigned advance = entry >> 8 & 255;
        uint64_t beyond = b.buffer << INDEX_BITS >> 1 >> (entry >> 32 & 63);
        block[slots[entry >> 16 & 255]] = (int16_t)((int64_t)(entry << 16) >> 54);
        block[slots[entry >> 24 & 255]] = (int16_t)((entry >> 48) + beyond);
        drop(&b, entry & 63);
        place += advance;
        if (__builtin_expect(place & 64, 0)) { /* all but the usual ways on and to an end */
            if (place != 64) {
                Bits again = before;
                place = read_plainly(&again, step, place - advance, advance != UNKNOWN, block);
                if (!place)
                    return 0;
                b.next = again.next, b.buffer = again.buffer, b.left = again.left;
                turn = 1; /* refill */
            }
            advance = place == 64 ? OVER : 0;
        }
        const uint64_t over = advance >> 7, mask = 0 - over;
        const uintptr_t ac = (uintptr_t)step->ac, dc = (uintptr_t)step[1].dc;
        entries = (const uint64_t *)(ac ^ ((ac ^ dc) & (uintptr_t)mask));
        place &= ~(unsigned)mask;
        step += over;
        block += BLOCK * over;
    }
    bits->next = b.next, bits->buffer = b.buffer, bits->left = b.left;
    return b.next < b.stop;
}

#endif
