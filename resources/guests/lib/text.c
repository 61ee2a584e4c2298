/* Strings, memory blocks and options of the command line. */
#include "runtime.h"

void *memset(void *to, int value, size_t size) {
    void *start = to;
    __asm__ volatile("rep stosb" : "+D"(to), "+c"(size) : "a"(value) : "memory");
    return start;
}

void *memcpy(void *to, const void *from, size_t size) {
    void *start = to;
    __asm__ volatile("rep movsb" : "+D"(to), "+S"(from), "+c"(size)::"memory");
    return start;
}

size_t text_length(const char *text) {
    size_t length = 0;
    while (text[length])
        length++;
    return length;
}

bool text_equal(const char *a, const char *b) {
    size_t length = text_length(a);
    return length == text_length(b) && bytes_equal(a, b, length);
}

bool bytes_equal(const void *a, const void *b, size_t size) {
    for (size_t i = 0; i < size; i++)
        if (((const u8 *)a)[i] != ((const u8 *)b)[i])
            return false;
    return true;
}

u64 page_checksum(u64 start, u64 size) {
    u64 sum = 0;
    for (u64 offset = 0; offset + 8 <= size; offset += 4096)
        sum = (sum << 1 | sum >> 63) ^ read64(start + offset);
    return (sum << 1 | sum >> 63) ^ read64(start + size - 8);
}

/* The text after `key=` at the start of a word of the command line, or NULL. */
static const char *find_option(const char *key) {
    size_t length = text_length(key);
    for (const char *word = command_line; *word; word++) {
        bool starts_word = word == command_line || word[-1] == ' ';
        size_t left = text_length(word);
        if (starts_word && left > length && bytes_equal(word, key, length) && word[length] == '=')
            return word + length + 1;
    }
    return NULL;
}

u64 option(const char *key, u64 otherwise) {
    const char *text = find_option(key);
    if (!text)
        return otherwise;
    u32 base = 10;
    if (text[0] == '0' && text[1] == 'x') {
        base = 16;
        text += 2;
    }
    u64 value = 0;
    for (; *text && *text != ' '; text++) {
        u32 digit = *text <= '9' ? (u32)(*text - '0') : (u32)((*text | 0x20) - 'a') + 10;
        require(digit < base, "option %s: not a number", key);
        value = value * base + digit;
    }
    return value;
}

bool option_text(const char *key, char *value, size_t size) {
    const char *text = find_option(key);
    size_t length = 0;
    if (!text)
        return false;
    while (length + 1 < size && text[length] && text[length] != ' ') {
        value[length] = text[length];
        length++;
    }
    value[length] = 0;
    return true;
}
