/* The Python module mmstream.decoding.image._reduced: decode.h and planes.h as functions of bytes. */

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include "decode.h"
#include "planes.h"

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

/* Returns [(samples, stride, height, width), ...], one for each component. */
static PyObject *new_planes(int count, Plane *planes)
{
    PyObject *list = PyList_New(0);
    for (int i = 0; list && i < count; i++) {
        Plane *plane = &planes[i];
        PyObject *samples = PyByteArray_FromStringAndSize(NULL, (Py_ssize_t)plane_size(plane));
        if (samples)
            plane->samples = (uint8_t *)PyByteArray_AS_STRING(samples);
        PyObject *item = samples ? Py_BuildValue("Nnii", samples, (Py_ssize_t)plane->stride,
            plane->height, plane->width) : NULL;
        if (!item || PyList_Append(list, item))
            Py_CLEAR(list);
        Py_XDECREF(item);
    }
    return list;
}

static PyObject *decode_bytes_to_planes(
    PyObject *bytes, int height, int width, Picture *picture)
{
    const uint8_t *data = (const uint8_t *)PyBytes_AS_STRING(bytes);
    size_t size = (size_t)PyBytes_GET_SIZE(bytes), start;
    Plane planes[3] = {0};
    int accepted;
    Py_BEGIN_ALLOW_THREADS
    start = read_headers(picture, data, size);
    Py_END_ALLOW_THREADS
    if (!start || height > divide_up(picture->height, picture->factor)
        || width > divide_up(picture->width, picture->factor))
        Py_RETURN_NONE;
    size_planes(picture, height, width, planes);
    PyObject *list = new_planes(picture->count, planes);
    if (!list)
        return NULL;
    Py_BEGIN_ALLOW_THREADS
    accepted = decode_planes(picture, data + start, size - start, height, width, planes);
    Py_END_ALLOW_THREADS
    if (accepted)
        return list;
    Py_DECREF(list);
    Py_RETURN_NONE;
}

static int is_factor(int factor)
{
    return factor == 1 || factor == 2 || factor == 4 || factor == 8;
}

static PyObject *decode_to_planes(PyObject *module, PyObject *args)
{
    PyObject *bytes; /* as above */
    int factor, chroma_factor, height, width;
    (void)module;
    if (!PyArg_ParseTuple(args, "Siiii", &bytes, &factor, &chroma_factor, &height, &width))
        return NULL;
    PyObject *result = NULL;
    Picture *picture = calloc(1, sizeof *picture);
    if (!picture)
        PyErr_NoMemory();
    else if (!is_factor(factor) || !is_factor(chroma_factor))
        PyErr_SetString(PyExc_ValueError, "factors are 1, 2, 4 or 8");
    else if (height < 1 || width < 1)
        PyErr_SetString(PyExc_ValueError, "height and width are at least 1");
    else {
        picture->factor = factor;
        picture->chroma_factor = chroma_factor;
        picture->is_planes = 1;
        result = decode_bytes_to_planes(bytes, height, width, picture);
    }
    free(picture);
    return result;
}

static PyMethodDef methods[] = {
    {"decode_reduced", decode_reduced, METH_VARARGS,
        "decode_reduced(data, factor) -> (pixels, height, width), or None: use libjpeg."},
    {"decode_planes", decode_to_planes, METH_VARARGS,
        "decode_planes(data, factor, chroma_factor, height, width) -> "
        "[(samples, stride, height, width), ...], or None: use libjpeg."},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, .m_name = "_reduced", .m_size = 0, .m_methods = methods};

PyMODINIT_FUNC PyInit__reduced(void)
{
    fill_samples();
    return PyModuleDef_Init(&definition);
}
