// A strip of a radial kernel matrix, ROWS rows against a stretch of COLUMNS inputs: squared distances, then the profile.
//
// Both are bound by arithmetic: sums and exponentials that do not wait for each other keep the processor busy.

#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

namespace {

#ifdef __AVX512F__
constexpr int BYTES = 64, ABREAST = 4;  // vectors of each row at a time, as many as the registers hold
#elif defined __AVX__
constexpr int BYTES = 32, ABREAST = 2;
#else
constexpr int BYTES = 16, ABREAST = 2;
#endif
constexpr int ROWS = 4;
template <class T> constexpr int LANES = BYTES / sizeof(T);
template <class T> constexpr int BLOCK = ABREAST * LANES<T>;
template <class T> constexpr int COLUMNS = 2048 / sizeof(T);
template <class T> using Strip = T[ROWS][COLUMNS<T>];
static_assert(BLOCK<double> % ROWS == 0);  // rows of the diagonal stay in a block

template <class T> struct VectorOf {
    typedef T type __attribute__((vector_size(BYTES)));
    typedef T anywhere __attribute__((vector_size(BYTES), aligned(sizeof(T)), may_alias));
};
template <class T> using Vector = typename VectorOf<T>::type;

template <class T> inline Vector<T> load(const T* from) {
    return *reinterpret_cast<const typename VectorOf<T>::anywhere*>(from);
}

template <class T> inline void store(const Vector<T>& v, T* to) {
    *reinterpret_cast<typename VectorOf<T>::anywhere*>(to) = v;
}

// Sum N data by halves, the first of which are vectors.
template <int N, class T> inline T total(const T* at) {
    if constexpr (N == 1) return *at;
    else {
        typedef T Half __attribute__((vector_size(N / 2 * sizeof(T)), aligned(sizeof(T)), may_alias));
        T sum[N / 2];
        *reinterpret_cast<Half*>(sum) = *reinterpret_cast<const Half*>(at) + *reinterpret_cast<const Half*>(at + N / 2);
        return total<N / 2>(sum);
    }
}

template <class T> inline T total(const Vector<T>& v) {
    T at[LANES<T>];
    store<T>(v, at);
    return total<LANES<T>>(at);
}

template <class To, class From> inline To bits(const From& from) {
    static_assert(sizeof(To) == sizeof(From));
    To to;
    std::memcpy(&to, &from, sizeof to);
    return to;
}

// ---- 2^-x -----------------------------------------------------------------------------------------------------------

// 2^r for |r| <= 1/2 as a polynomial of least relative error: 3e-18 and 2e-9.
template <class T> struct Format;
template <> struct Format<double> {
    using Bits = int64_t;
    static constexpr int mantissa = 52, terms = 12;
    static constexpr double bias = 1023;
    static constexpr double shift = 6755399441055744.0 + bias;  // 1.5 2^52: what it is added to ends as an integer
    static constexpr double power[] = {
        0.9999999999999999971,      0.69314718055994533046,     0.24022650695910156205,   0.055504108664819921483,
        0.0096181291075883350833,   0.0013333558146789950323,   0.00015403530462514613026, 0.0000152527334899608046,
        1.3215433089594629037e-6,   1.0178198033328527662e-7,   7.0741056262456593708e-9, 4.4352809446103361611e-10};
};
template <> struct Format<float> {
    using Bits = int32_t;
    static constexpr int mantissa = 23, terms = 7;
    static constexpr float bias = 127;
    static constexpr float shift = 12582912.0f + bias;
    static constexpr float power[] = {1.0000000005541662993f,   0.69314720573725267536f,  0.24022646890639572134f,
                                      0.055503287769976637639f, 0.0096184889565227915705f, 0.0013399931209474140493f,
                                      0.00015345812158740182477f};
};

template <class T, int K = 0> inline Vector<T> polynomial(const Vector<T>& r) {
    constexpr T c = Format<T>::power[K];
    if constexpr (K + 1 == Format<T>::terms) return Vector<T>{} + c;
    else return polynomial<T, K + 1>(r) * r + c;
}

// 2^-x for x >= 0; 0 from half the smallest normal number or so. What is not a number stays so.
template <class T> inline Vector<T> fall(const Vector<T>& x) {
    using F = Format<T>;
    using Integers = typename VectorOf<typename F::Bits>::type;
    const Vector<T> near = x > F::bias ? Vector<T>{} + F::bias : x;
    const Vector<T> shifted = F::shift - near;  // ends as bias - whole, the exponent of 2^-whole
    const Vector<T> whole = F::shift - shifted;
    return polynomial<T>(whole - near) * bits<Vector<T>>(bits<Integers>(shifted) << F::mantissa);
}

// ---- a strip of a kernel matrix -------------------------------------------------------------------------------------

enum Profile { RBF, MATERN12, MATERN32, MATERN52 };

template <class T> struct Factor {
    int64_t profile, dimension;
    const T* x;  // (n, dimension), in units in which the profile falls as 2^-|x - y|^2 (RBF) or 2^-|x - y|
    const T* y;  // (stretch, dimension, COLUMNS)
};

// Which columns of a stretch a strip needs, multiples of BLOCK, and from where on they stand for their mirror image too.
struct Span {
    int first, mirrored, stop;
};

// Put |x - y|^2 of ROWS rows x (row, d) and BLOCK columns y (d, COLUMNS).
template <class T> inline void squares(const T* x, const T* y, int64_t dimension, T* q) {
    Vector<T> sum[ROWS][ABREAST] = {};
    for (int64_t k = 0; k < dimension; ++k)
#pragma GCC unroll 4
        for (int i = 0; i < ABREAST; ++i) {
            const Vector<T> column = load(y + k * COLUMNS<T> + i * LANES<T>);
#pragma GCC unroll 4
            for (int r = 0; r < ROWS; ++r) {
                const Vector<T> difference = x[r * dimension + k] - column;
                sum[r][i] += difference * difference;
            }
        }
#pragma GCC unroll 4
    for (int r = 0; r < ROWS; ++r)
#pragma GCC unroll 4
        for (int i = 0; i < ABREAST; ++i) store<T>(sum[r][i], q + r * COLUMNS<T> + i * LANES<T>);
}

// Put the roots of BLOCK columns of a row in their place.
template <class T> inline void root(T* q) {
    for (int j = 0; j < BLOCK<T>; ++j) q[j] = std::sqrt(q[j]);
}

// Put p of BLOCK columns of a row in the place of |x - y|^2, RBF's, or of |x - y|, and dp/dt beside it.
template <class T, int P, bool SLOPES> inline void take(T* p, T* slope) {
    constexpr T ln2 = T(0.69314718055994530942);
#pragma GCC unroll 4
    for (int j = 0; j < BLOCK<T>; j += LANES<T>) {
        const Vector<T> x = load(p + j), e = fall<T>(x);
        if constexpr (P == RBF || P == MATERN12) {
            store<T>(e, p + j);
            if constexpr (SLOPES && P == RBF) store<T>(e, slope + j);
            if constexpr (SLOPES && P == MATERN12) store<T>(x > 0 ? e / x * T(-0.5 / ln2) : Vector<T>{}, slope + j);
        } else if constexpr (P == MATERN32) {
            store<T>((x * ln2 + 1) * e, p + j);
            if constexpr (SLOPES) store<T>(e * T(-0.5), slope + j);
        } else {
            const Vector<T> linear = x * ln2 + 1;
            store<T>((x * x * (ln2 * ln2 / 3) + linear) * e, p + j);
            if constexpr (SLOPES) store<T>(linear * e * T(-1.0 / 6), slope + j);
        }
    }
}

// Roots take the processor long but little of it: those of the next row are found beside everything else.
template <class T, int P, bool SLOPES>
void evaluate_as(const T* x, const T* y, int64_t dimension, Span span, T* p, T* slope) {
    squares(x, y + span.first, dimension, p + span.first);
    for (int j = span.first; j < span.stop; j += BLOCK<T>) {
        if constexpr (P != RBF) root(p + j);
        if (j + BLOCK<T> < span.stop) squares(x, y + j + BLOCK<T>, dimension, p + j + BLOCK<T>);
        for (int r = 0; r < ROWS; ++r) {
            const int at = r * COLUMNS<T> + j;
            if constexpr (P != RBF)
                if (r + 1 < ROWS) root(p + at + COLUMNS<T>);
            take<T, P, SLOPES>(p + at, slope + at);
        }
    }
}

// Put p of ROWS rows, the i-th of stretch `rows` and on, against a stretch of columns, and dp/dt where wanted.
template <class T, bool SLOPES>
void evaluate(const Factor<T>& factor, int64_t rows, int i, int64_t columns, Span span, Strip<T>& p, Strip<T>& slope) {
    const int64_t d = factor.dimension;
    const T *x = factor.x + (rows * COLUMNS<T> + i) * d, *y = factor.y + columns * d * COLUMNS<T>;
    switch (factor.profile) {
        case RBF: return evaluate_as<T, RBF, SLOPES>(x, y, d, span, p[0], slope[0]);
        case MATERN12: return evaluate_as<T, MATERN12, SLOPES>(x, y, d, span, p[0], slope[0]);
        case MATERN32: return evaluate_as<T, MATERN32, SLOPES>(x, y, d, span, p[0], slope[0]);
        case MATERN52: return evaluate_as<T, MATERN52, SLOPES>(x, y, d, span, p[0], slope[0]);
    }
}

}  // namespace
