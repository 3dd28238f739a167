/* Huffman-coded JPEG data to DCT coefficients.

   headers.h defines the tables, read_blocks() reads with them, pixels.h transforms the result. A
   reduced picture needs few of the coefficients. So one table look-up passes several codes at once.
   Included by decode.h only.

   The terms are those of ITU-T T.81, the JPEG standard. A block has 64 coefficients in zigzag
   order. Coefficient 0 is DC, 1 to 63 are AC. A Huffman code stands for a symbol. The symbol tells
   how many zero coefficients come first (the run), and how many bits the value has (the size). */

#ifndef ENTROPY_H
#define ENTROPY_H

#include <stdint.h>
#include <string.h>

#define BLOCK 64
#define CODE_BITS 9       /* longest code in the direct table of a Huffman table */
#define INDEX_BITS 10     /* next bits that select an entry; at most 11, as `first` has 10 bits.
                             With 10, the entries of a picture's four tables take 32 KB */
#define ENDS_BLOCK 128    /* added to the advance of an entry that ends the block */
#define NO_ENTRY 192      /* the advance of an entry whose first code is too long or invalid */
#define NO_COEFFICIENT 64 /* a zigzag position after the block's end; its slot is UNUSED_SLOT */
#define UNUSED_SLOT 64    /* a slot of the block that no transform reads */
#define SLOTS 72          /* of a block in memory: its coefficients, UNUSED_SLOT, and alignment */

/* ---- Huffman tables */

typedef struct {
    int defined;
    /* By code length. 16 bits below limit[n], and not below limit[n - 1], begin with a code of n
       bits. The index of its symbol is the code + offset[n]. */
    uint32_t limit[17];
    int offset[17];
    uint8_t symbols[256];
    uint16_t codes[1 << CODE_BITS]; /* by the next bits: length << 8 | symbol, 0 for longer codes */
} Huffman;

static unsigned find_long_code(const Huffman *table, unsigned next16)
{
    for (int length = 1; length <= 16; length++)
        if (next16 < table->limit[length]) {
            int index = table->offset[length] + (int)(next16 >> (16 - length));
            return (unsigned)length << 8 | table->symbols[index];
        }
    return 0;
}

/* Returns length << 8 | symbol of the code that these 16 bits begin with, 0 if there is none. */
static inline unsigned find_code(const Huffman *table, unsigned next16)
{
    unsigned code = table->codes[next16 >> (16 - CODE_BITS)];
    return code ? code : find_long_code(table, next16);
}

/* Defines a table from the number of codes of each length. Returns 0 if the codes are invalid. The
   caller has checked that there are at most 256.

   Example: two codes of 2 bits (00, 01) and one of 3 bits (100).
   limit[2] = 0b10 << 14 = 0x8000, offset[2] = 0. limit[3] = 0b101 << 13 = 0xa000, offset[3] = -2.
   Code 100 is 4, so its symbol is symbols[4 - 2]. */
static int define_huffman(Huffman *table, const uint8_t *counts, const uint8_t *symbols)
{
    uint32_t code = 0;
    int index = 0;
    for (int length = 1; length <= 16; length++) {
        table->offset[length] = index - (int)code;
        code += counts[length - 1];
        index += counts[length - 1];
        if (code >= 1u << length) /* the standard forbids a code of all ones */
            return 0;
        table->limit[length] = code << (16 - length);
        code <<= 1;
    }
    memcpy(table->symbols, symbols, (size_t)index);
    for (unsigned i = 0; i < 1 << CODE_BITS; i++) {
        unsigned found = find_long_code(table, i << (16 - CODE_BITS));
        table->codes[i] = found >> 8 <= CODE_BITS ? (uint16_t)found : 0;
    }
    table->defined = 1;
    return 1;
}

/* ---- bits */

typedef struct {
    const uint8_t *next; /* never moves beyond `stop` */
    const uint8_t *stop; /* 8 bytes after the data; 16 bytes after the data are zero */
    uint64_t buffer;     /* the next bits, from the highest bit down */
    uint64_t left;       /* how many bits of `buffer` are valid */
} Bits;

/* Makes 56 or more bits valid. Reads eight bytes, at most up to the end of the 16 zero bytes. */
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

/* Returns the value that `size` bits stand for. It is negative if the highest of them is 0.
   Example: size 2 has the values 00 -3, 01 -2, 10 2, 11 3. */
static inline int extend(unsigned bits, unsigned size)
{
    return size && !(bits >> (size - 1)) ? (int)bits - (1 << size) + 1 : (int)bits;
}

static inline unsigned top_bits(uint64_t buffer, unsigned count)
{
    return (unsigned)(buffer >> 1 >> (63 - count));
}

/* ---- entries

   The next INDEX_BITS bits are the index of an entry. It holds all that these bits tell:

   bits 0-5    how many bits to drop
   bits 8-15   how many zigzag positions to advance, with ENDS_BLOCK, or NO_ENTRY
   bits 16-23  the position of the first value, counted from the present position
   bits 24-31  the position of the last value
   bits 32-37  shift: the bits after the index, shifted right by it, are added to `last`
   bits 38-47  first: a value, signed
   bits 48-63  last: a value, signed; its low bits may lie after the index

   Example, with the usual AC codes 00 (run 0, size 1), 01 (run 0, size 2) and 1010 (end of block):
   index 00 1 00 0 1010 has the values 1 and -1. The entry drops 10 bits, advances 2 + ENDS_BLOCK,
   has first 1 for position 0 and last -1 for position 1. Its shift is 63, which adds nothing. */

static uint64_t pack_entry(unsigned bits, unsigned advance, const unsigned positions[2],
    unsigned shift, int first, int last)
{
    return bits | advance << 8 | positions[0] << 16 | (uint64_t)positions[1] << 24
        | (uint64_t)shift << 32 | (uint64_t)(first & 1023) << 38 | (uint64_t)(uint16_t)last << 48;
}

/* Sets `base` to a value of `size` bits, of which the index holds the first `inside`, at least one.
   Bits after the index count as 0. Returns the shift that brings those bits to their place.

   Example: size 5, the index ends after 10. The base is extend(10000) = 16, and 3 bits are missing.
   The shift is 60: a right shift by 1 and by 60 leaves the next 3 bits. */
static unsigned begin_value(unsigned next16, unsigned inside, unsigned size, int *base)
{
    unsigned known = size < inside ? size : inside, missing = size - known;
    *base = extend((next16 >> (16 - known)) << missing, size);
    return 63 - missing;
}

static void build_dc_entries(const Huffman *table, uint64_t *entries)
{
    for (unsigned i = 0; i < 1 << INDEX_BITS; i++) {
        unsigned next16 = i << (16 - INDEX_BITS), code = find_code(table, next16);
        unsigned length = code >> 8, size = code & 255, shift = 63;
        unsigned positions[2] = {NO_COEFFICIENT, NO_COEFFICIENT};
        int base = 0;
        int known = code && length + (size > 0) <= INDEX_BITS;
        if (known && size)
            shift = begin_value(next16 << length & 0xffff, INDEX_BITS - length, size, &base);
        if (known)
            positions[1] = 0;
        entries[i] = pack_entry(
            known ? length + size : 0, known ? 1 : NO_ENTRY, positions, shift, 0, base);
    }
}

/* An entry has as many coefficients as the index holds. If the values are wanted, at most two of
   them are not zero. If they are not wanted, no values are kept. */
static void build_ac_entries(const Huffman *table, int wanted, uint64_t *entries)
{
    for (unsigned i = 0; i < 1 << INDEX_BITS; i++) {
        unsigned bits = 0, advance = 0, values = 0, shift = 63;
        unsigned positions[2] = {NO_COEFFICIENT, NO_COEFFICIENT};
        int first = 0, last = 0;
        while (bits < INDEX_BITS) {
            unsigned next16 = i << bits << (16 - INDEX_BITS) & 0xffff;
            unsigned code = find_code(table, next16);
            unsigned length = code >> 8, run = code >> 4 & 15, size = code & 15;
            unsigned inside = INDEX_BITS - bits - length;
            if (!code || length > INDEX_BITS - bits || size > 10 || (!size && run % 15))
                break;
            if (!size && !run) { /* end of block */
                bits += length;
                advance |= ENDS_BLOCK;
                break;
            }
            if (advance + run + 1 > 63 || (wanted && size && (values == 2 || !inside)))
                break;
            if (wanted && size) {
                positions[0] = positions[1];
                first = last;
                positions[1] = advance + run;
                shift = begin_value(next16 << length & 0xffff, inside, size, &last);
                values++;
            }
            bits += length + size;
            advance += run + 1;
        }
        entries[i] = pack_entry(bits, advance ? advance : NO_ENTRY, positions, shift, first, last);
    }
}

/* ---- blocks */

/* What it takes to read one block of an MCU. */
typedef struct {
    const Huffman *dc_table, *ac_table;
    const uint64_t *dc_entries, *ac_entries;
    const uint8_t *slots; /* by zigzag position: where in a block a coefficient is stored */
} BlockReader;

/* Reads one symbol. Returns the position after it: 64 if the block ends, 0 if it is invalid. */
static inline unsigned read_symbol(
    Bits *bits, const BlockReader *reader, unsigned position, unsigned *value_position, int *value)
{
    unsigned code, run, size;
    refill(bits);
    code = find_code(
        position ? reader->ac_table : reader->dc_table, (unsigned)(bits->buffer >> 48));
    run = code >> 4 & 15;
    size = code & 15;
    *value_position = NO_COEFFICIENT;
    *value = 0;
    if (!code || size > 10u + !position || (position && !size && run % 15))
        return 0;
    drop(bits, code >> 8);
    if (position && !size && !run) /* end of block */
        return 64;
    if (position + run + 1 > 64)
        return 0;
    if (size) {
        *value_position = position + run;
        *value = extend(top_bits(bits->buffer, size), size);
    }
    drop(bits, size);
    return position + run + 1;
}

/* Reads symbol by symbol, in two cases. Where there is no entry, it reads one symbol and stores its
   value. Where the block ends among the symbols of an entry, their values are stored already. Then
   it reads to the end of the block, to learn how many bits belong to it. */
static unsigned read_slowly(
    Bits *bits, const BlockReader *reader, unsigned position, int has_entry, int16_t *block)
{
    int value;
    unsigned value_position;
    do {
        position = read_symbol(bits, reader, position, &value_position, &value);
        if (position && !has_entry)
            block[reader->slots[value_position]] = (int16_t)value;
    } while (has_entry && position && position < 64);
    return position;
}

/* Reads one block for each reader into `block`, which is all zeros. In place of DC it stores the
   difference from the DC before. Returns 0 for an invalid code, or if the data end too early.

   A processor cannot predict where a block ends, so the usual end is no branch. A mask selects the
   entries of this block's AC or of the next block's DC. For this `end` is a valid reader, too.

   An entry drops at most 20 bits, and a refill makes 56 valid. So only every other turn refills.
   A position is at most 63, and a value at most 64 positions on. So `slots` has 128 elements. */
static int read_blocks(
    Bits *bits, const BlockReader *reader, const BlockReader *end, int16_t *block)
{
    unsigned position = 0;
    const uint64_t *entries = reader->dc_entries;
    Bits b = {bits->next, bits->stop, bits->buffer, bits->left};
    for (unsigned turn = 0; reader < end; turn++) {
        if (!(turn & 1))
            refill(&b);
        const Bits before = b;
        const uint64_t entry = entries[b.buffer >> (64 - INDEX_BITS)];
        const uint8_t *slots = reader->slots + position;
        unsigned advance = entry >> 8 & 255;
        uint64_t low_bits = b.buffer << INDEX_BITS >> 1 >> (entry >> 32 & 63);
        block[slots[entry >> 16 & 255]] = (int16_t)((int64_t)(entry << 16) >> 54);
        block[slots[entry >> 24 & 255]] = (int16_t)((entry >> 48) + low_bits);
        drop(&b, entry & 63);
        position += advance;
        if (__builtin_expect(position & 64, 0)) {
            if (position != 64) { /* no entry, or the block ends among its symbols */
                Bits slow = before;
                position = read_slowly(
                    &slow, reader, position - advance, advance != NO_ENTRY, block);
                if (!position)
                    return 0;
                b.next = slow.next, b.buffer = slow.buffer, b.left = slow.left;
                turn = 1; /* the next turn refills */
            }
            advance = position == 64 ? ENDS_BLOCK : 0;
        }
        const uint64_t ended = advance >> 7, mask = 0 - ended;
        const uintptr_t ac = (uintptr_t)reader->ac_entries, dc = (uintptr_t)reader[1].dc_entries;
        entries = (const uint64_t *)(ac ^ ((ac ^ dc) & (uintptr_t)mask));
        position &= ~(unsigned)mask;
        reader += ended;
        block += SLOTS * ended;
    }
    bits->next = b.next, bits->buffer = b.buffer, bits->left = b.left;
    return b.next < b.stop;
}

#endif
