/* The Python module mmstream.tar._plain_samples: samples of plain files, out of the bytes of tars.
 *
 * It takes only what nearly all shards have: files with a short ASCII name KEY.FIELD, and numbers
 * as nearly all programs write them. For every other sample it answers None, and Python reads it.
 * Each byte of a header is read within the sample, whose bounds are checked first. */

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <stdint.h>
#include <string.h>

enum {
    BLOCK = 512,
    MAX_NAME = 100,
    MAX_MEMBERS = 64, /* of a sample; each is compared with those before it */
    SIZE = 124,
    SIZE_DIGITS = 11,
    CHECKSUM = 148,
    CHECKSUM_DIGITS = 6,
    KIND = 156,
    PREFIX = 345
};

/* Returns the number in a field of octal digits, behind which are NUL and spaces only; else -1. */
static int64_t octal(const uint8_t *text, int num_digits, int length)
{
    int64_t number = 0;
    for (int i = 0; i < length; i++) {
        if (i >= num_digits) {
            if (text[i] != 0 && text[i] != ' ')
                return -1;
        } else if (text[i] < '0' || text[i] > '7')
            return -1;
        else
            number = number * 8 + (text[i] - '0');
    }
    return number;
}

/* Returns the size of the plain file of a header; -1 where it is something else, or damaged. */
static int64_t plain_size(const uint8_t *header)
{
    int64_t total = 8 * ' ';
    for (int i = 0; i < BLOCK; i++)
        total += header[i];
    for (int i = CHECKSUM; i < CHECKSUM + 8; i++)
        total -= header[i];
    if (header[KIND] != '0' || header[PREFIX] != 0
        || octal(header + CHECKSUM, CHECKSUM_DIGITS, 8) != total)
        return -1;
    return octal(header + SIZE, SIZE_DIGITS, 12);
}

/* Splits a name at its first dot, and writes the field in lower case. Returns the length of the
 * key; 0 where the name is not a plain one, or could be one with a meaning of its own. */
static int split_name(const uint8_t *name, char field[MAX_NAME], int *field_length)
{
    int key_length = 0, length = 0;
    for (; length < MAX_NAME && name[length]; length++) {
        uint8_t c = name[length];
        if (c >= 0x80 || c == '/' || (c == '_' && length && name[length - 1] == '_'))
            return 0;
        if (key_length)
            field[length - key_length - 1] = (char)(c >= 'A' && c <= 'Z' ? c + 'a' - 'A' : c);
        else if (c == '.')
            key_length = length;
        if (c == '.' && !length)
            return 0;
    }
    *field_length = length - key_length - 1;
    if (!key_length || *field_length < 1)
        return 0;
    if (*field_length > 6 && !memcmp(field, "image_", 6)) /* perhaps a name of mmstream's own */
        return 0;
    return key_length;
}

/* Adds a field to a sample. Returns 1; 0 where the sample is not plain; -1 after an error. */
static int add_field(PyObject *sample, const char *field, int length, const uint8_t *data,
    int64_t num_bytes)
{
    PyObject *name = PyUnicode_FromStringAndSize(field, length);
    if (!name)
        return -1;
    PyUnicode_InternInPlace(&name);
    int result = PyDict_Contains(sample, name); /* a field that comes twice is an error */
    if (result >= 0) {
        result = !result;
        if (result) {
            PyObject *value = PyBytes_FromStringAndSize((const char *)data, num_bytes);
            if (!value || PyDict_SetItem(sample, name, value) < 0)
                result = -1;
            Py_XDECREF(value);
        }
    }
    Py_DECREF(name);
    return result;
}

/* Adds the fields of a sample, and its key. Returns as `add_field`. */
static int add_members(PyObject *sample, PyObject *key_name, const uint8_t *data, int64_t size)
{
    const uint8_t *key = data;
    int key_length = 0;
    for (int64_t member = 0, offset = 0; offset < size; member++) {
        char field[MAX_NAME];
        int field_length;
        const uint8_t *header = data + offset;
        int64_t num_bytes = plain_size(header);
        int length = num_bytes < 0 ? 0 : split_name(header, field, &field_length);
        offset += BLOCK;
        if (!length || num_bytes > size - offset || member == MAX_MEMBERS)
            return 0;
        if (!member) {
            key_length = length;
            PyObject *text = PyUnicode_FromStringAndSize((const char *)key, key_length);
            int failed = !text || PyDict_SetItem(sample, key_name, text) < 0;
            Py_XDECREF(text);
            if (failed)
                return -1;
        } else if (length != key_length || memcmp(header, key, key_length))
            return 0;
        int result = add_field(sample, field, field_length, data + offset, num_bytes);
        if (result < 1)
            return result;
        offset += (num_bytes + BLOCK - 1) / BLOCK * BLOCK;
    }
    return 1;
}

/* Returns a sample as a dict, None where it is not plain, NULL after an error. */
static PyObject *plain_sample(const Py_buffer *data, Py_ssize_t start, Py_ssize_t stop,
    PyObject *url, PyObject *key_name, PyObject *url_name)
{
    if (start < 0 || start >= stop || stop > data->len || start % BLOCK || stop % BLOCK)
        Py_RETURN_NONE;
    PyObject *sample = PyDict_New();
    if (!sample)
        return NULL;
    int result = -1;
    /* The key comes first in the dict. */
    if (PyDict_SetItem(sample, key_name, Py_None) == 0
        && PyDict_SetItem(sample, url_name, url) == 0)
        result = add_members(sample, key_name, (const uint8_t *)data->buf + start, stop - start);
    if (result == 1)
        return sample;
    Py_DECREF(sample);
    if (result < 0)
        return NULL;
    Py_RETURN_NONE;
}

static PyObject *plain_samples(PyObject *module, PyObject *args)
{
    Py_buffer data;
    PyObject *starts, *stops, *urls;
    (void)module;
    if (!PyArg_ParseTuple(args, "y*O!O!O!", &data, &PyList_Type, &starts, &PyList_Type, &stops,
            &PyList_Type, &urls))
        return NULL;
    Py_ssize_t count = PyList_GET_SIZE(starts);
    PyObject *key_name = PyUnicode_InternFromString("__key__");
    PyObject *url_name = PyUnicode_InternFromString("__url__");
    PyObject *samples = key_name && url_name ? PyList_New(count) : NULL;
    if (samples && (PyList_GET_SIZE(stops) != count || PyList_GET_SIZE(urls) != count)) {
        PyErr_SetString(PyExc_ValueError, "starts, stops and urls have one entry per sample");
        Py_CLEAR(samples);
    }
    for (Py_ssize_t i = 0; samples && i < count; i++) {
        Py_ssize_t start = PyLong_AsSsize_t(PyList_GET_ITEM(starts, i));
        Py_ssize_t stop = PyErr_Occurred() ? -1 : PyLong_AsSsize_t(PyList_GET_ITEM(stops, i));
        PyObject *sample = NULL;
        if (!PyErr_Occurred())
            sample = plain_sample(
                &data, start, stop, PyList_GET_ITEM(urls, i), key_name, url_name);
        if (sample)
            PyList_SET_ITEM(samples, i, sample);
        else
            Py_CLEAR(samples);
    }
    Py_XDECREF(key_name);
    Py_XDECREF(url_name);
    PyBuffer_Release(&data);
    return samples;
}

static PyMethodDef methods[] = {
    {"plain_samples", plain_samples, METH_VARARGS,
        "plain_samples(data, starts, stops, urls) -> [sample, or None: parse it, ...]"},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, .m_name = "_plain_samples", .m_size = 0, .m_methods = methods};

PyMODINIT_FUNC PyInit__plain_samples(void)
{
    return PyModuleDef_Init(&definition);
}
