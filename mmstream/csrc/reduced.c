/* The Python module mmstream.decoding._reduced: decode.h as a function of bytes. */

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include "decode.h"

static PyObject *decode_bytes(PyObject *bytes, int factor, Picture *picture)
{
    const uint8_t *data = (const uint8_t *)PyBytes_AS_STRING(bytes);
    size_t size = (size_t)PyBytes_GET_SIZE(bytes), start;
    int accepted;
    picture->factor = factor;
    Py_BEGIN_ALLOW_THREADS
    start = read_headers(picture, data, size);
    Py_END_ALLOW_THREADS
    if (!start)
        Py_RETURN_NONE;
    int width = divide_up(picture->width, factor), height = divide_up(picture->height, factor);
    PyObject *pixels = PyByteArray_FromStringAndSize(NULL, (Py_ssize_t)width * height * 3);
    if (!pixels)
        return NULL;
    uint8_t *rgb = (uint8_t *)PyByteArray_AS_STRING(pixels);
    Py_BEGIN_ALLOW_THREADS
    accepted = decode(picture, data + start, size - start, rgb);
    Py_END_ALLOW_THREADS
    if (accepted)
        return Py_BuildValue("Nii", pixels, height, width);
    Py_DECREF(pixels);
    Py_RETURN_NONE;
}

static PyObject *decode_reduced(PyObject *module, PyObject *args)
{
    PyObject *bytes; /* no other buffer: the data must not change between a check and its use */
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
        "decode_reduced(data, factor) -> (pixels, height, width), or None: use libjpeg."},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, .m_name = "_reduced", .m_size = 0, .m_methods = methods};

PyMODINIT_FUNC PyInit__reduced(void)
{
    fill_samples();
    return PyModuleDef_Init(&definition);
}
