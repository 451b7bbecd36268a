// An operation as Python describes it; `native_library.Op` is the same.

#pragma once
#include <cstdint>

namespace {

struct Op {
    int64_t code;
    void* p[12];
    int64_t n[12];
    double f[2];
};

template <class T> inline T* at(const Op& o, int i) { return static_cast<T*>(o.p[i]); }

}  // namespace
