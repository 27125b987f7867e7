// Tiles of radial kernel matrices, for products and derivatives: see compiled_tiles.py, which packs what comes in.
//
// Inputs, vectors and sums come in stretches of COLUMNS data, the last one filled up with zeros: (stretch, row, COLUMNS).
// A tile is one stretch against another, taken ROWS at a time: squared distances, then the profile, then what they are
// for, each a loop over columns that stay in the first cache and become vectors of the processor.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <vector>

namespace {

constexpr int ROWS = 4;
template <class T> constexpr int COLUMNS = 2048 / sizeof(T);
template <class T> using Strip = T[ROWS][COLUMNS<T>];

#ifdef __AVX512F__
constexpr int BYTES = 64;
#else
constexpr int BYTES = 32;
#endif
template <class T> constexpr int LANES = BYTES / sizeof(T);
template <class T> struct VectorOf { typedef T type __attribute__((vector_size(BYTES))); };
template <class T> using Vector = typename VectorOf<T>::type;

template <class To, class From> inline To bits(const From& from) {
    static_assert(sizeof(To) == sizeof(From));
    To to;
    std::memcpy(&to, &from, sizeof to);
    return to;
}

template <class T> inline Vector<T> load(const T* from) {
    Vector<T> to;
    std::memcpy(&to, from, sizeof to);
    return to;
}

template <class T> inline void store(const T& from, void* to) { std::memcpy(to, &from, sizeof from); }

template <class T> inline T total(const Vector<T>& v) {
    T sum = 0;
    for (int i = 0; i < LANES<T>; ++i) sum += v[i];
    return sum;
}

// ---- e^-x -----------------------------------------------------------------------------------------------------------

// 2^r for |r| <= 1/2 as a polynomial of least relative error: 3e-18 and 2e-9.
template <class T> struct Format;
template <> struct Format<double> {
    using Bits = int64_t;
    static constexpr int mantissa = 52, bias = 1023, terms = 12;
    static constexpr double shift = 6755399441055744.0;  // 1.5 2^52: what it is added to ends as an integer
    static constexpr double power[] = {
        0.9999999999999999971,      0.69314718055994533046,     0.24022650695910156205,   0.055504108664819921483,
        0.0096181291075883350833,   0.0013333558146789950323,   0.00015403530462514613026, 0.0000152527334899608046,
        1.3215433089594629037e-6,   1.0178198033328527662e-7,   7.0741056262456593708e-9, 4.4352809446103361611e-10};
};
template <> struct Format<float> {
    using Bits = int32_t;
    static constexpr int mantissa = 23, bias = 127, terms = 7;
    static constexpr float shift = 12582912.0f;
    static constexpr float power[] = {1.0000000005541662993f,   0.69314720573725267536f,  0.24022646890639572134f,
                                      0.055503287769976637639f, 0.0096184889565227915705f, 0.0013399931209474140493f,
                                      0.00015345812158740182477f};
};

template <class T, int K = 0> inline T polynomial(T r) {
    constexpr T c = Format<T>::power[K];
    if constexpr (K + 1 == Format<T>::terms) return c;
    else return polynomial<T, K + 1>(r) * r + c;
}

// e^-x for x >= 0; 0 below the smallest normal number.
template <class T> inline T fall(T x) {
    using F = Format<T>;
    const T t = x * T(-1.4426950408889634074);
    const T shifted = t + F::shift;
    const T whole = bits<T>((bits<typename F::Bits>(shifted) + F::bias) << F::mantissa);
    return t < 1 - F::bias ? T(0) : polynomial(t - (shifted - F::shift)) * whole;
}

// ---- a strip of a kernel matrix -------------------------------------------------------------------------------------

enum Profile { RBF, MATERN12, MATERN32, MATERN52 };

template <class T> struct Factor {
    int64_t profile, dimension;
    const T* x;  // (n, dimension)
    const T* y;  // (stretch, dimension, COLUMNS)
};

// |x - y|^2 of ROWS rows x (row, d) and a stretch of columns y (d, COLUMNS).
template <class T> void squares(const T* x, const T* y, int64_t dimension, Strip<T>& q) {
    constexpr int TWO = 2;  // vectors of ROWS rows at a time: sums that do not wait for each other
    for (int j = 0; j < COLUMNS<T>; j += TWO * LANES<T>) {
        Vector<T> sum[ROWS][TWO] = {};
        for (int64_t k = 0; k < dimension; ++k)
            for (int i = 0; i < TWO; ++i) {
                const Vector<T> column = load(y + k * COLUMNS<T> + j + i * LANES<T>);
                for (int r = 0; r < ROWS; ++r) {
                    const Vector<T> difference = x[r * dimension + k] - column;
                    sum[r][i] += difference * difference;
                }
            }
        for (int r = 0; r < ROWS; ++r)
            for (int i = 0; i < TWO; ++i) store(sum[r][i], q[r] + j + i * LANES<T>);
    }
}

// Put p(t) in the place of t, and dp/dt beside it.
template <class T, int P, bool SLOPES> inline void take(T* t, T* slope) {
#pragma omp simd
    for (int j = 0; j < COLUMNS<T>; ++j) {
        if constexpr (P == RBF) {
            t[j] = fall(t[j]);
            if constexpr (SLOPES) slope[j] = t[j];
        } else {
            const T r = std::sqrt(t[j]), e = fall(r);
            if constexpr (P == MATERN12) {
                t[j] = e;
                if constexpr (SLOPES) slope[j] = r > 0 ? T(-0.5) * e / r : T(0);
            } else if constexpr (P == MATERN32) {
                t[j] = (1 + r) * e;
                if constexpr (SLOPES) slope[j] = T(-0.5) * e;
            } else {
                t[j] = (1 + r + r * r * T(1.0 / 3)) * e;
                if constexpr (SLOPES) slope[j] = (1 + r) * e * T(-1.0 / 6);
            }
        }
    }
}

// Put p of ROWS rows, the i-th of stretch `rows` and on, against a stretch of columns, and dp/dt where wanted.
template <class T, bool SLOPES>
void evaluate(const Factor<T>& factor, int64_t rows, int i, int64_t columns, Strip<T>& p, Strip<T>& slope) {
    const int64_t d = factor.dimension;
    squares(factor.x + (rows * COLUMNS<T> + i) * d, factor.y + columns * d * COLUMNS<T>, d, p);
    for (int r = 0; r < ROWS; ++r) {
        switch (factor.profile) {
            case RBF: take<T, RBF, SLOPES>(p[r], slope[r]); break;
            case MATERN12: take<T, MATERN12, SLOPES>(p[r], slope[r]); break;
            case MATERN32: take<T, MATERN32, SLOPES>(p[r], slope[r]); break;
            case MATERN52: take<T, MATERN52, SLOPES>(p[r], slope[r]); break;
        }
    }
}

template <class T> inline void multiply(Strip<T>& a, const Strip<T>& b) {
    for (int r = 0; r < ROWS; ++r)
#pragma omp simd
        for (int j = 0; j < COLUMNS<T>; ++j) a[r][j] *= b[r][j];
}

// How many of the n rows are in a stretch.
template <class T> inline int count(int64_t n, int64_t rows) {
    return int(std::min<int64_t>(COLUMNS<T>, n - rows * COLUMNS<T>));
}

template <class T> inline double inner(const Strip<T>& a, const Strip<T>& b) {
    double sum = 0;
    for (int r = 0; r < ROWS; ++r) {
        T row = 0;
#pragma omp simd reduction(+ : row)
        for (int j = 0; j < COLUMNS<T>; ++j) row += a[r][j] * b[r][j];
        sum += row;
    }
    return sum;
}

template <class T> inline void add(const std::vector<T>& what, T* to) {
    for (size_t j = 0; j < what.size(); ++j) to[j] += what[j];
}

// ---- products -------------------------------------------------------------------------------------------------------

// Add K v of C right-hand sides to `out` and, where mirrored, K' v of the rows to `sums`.
template <class T, int C, bool MIRRORED>
inline void apply(const Strip<T>& K, const T* v, const T* v_of_rows, T* out, T* sums) {
    Vector<T> found[C][ROWS] = {};
    for (int j = 0; j < COLUMNS<T>; j += LANES<T>) {
        Vector<T> k[ROWS];
        for (int r = 0; r < ROWS; ++r) k[r] = load(K[r] + j);
        for (int c = 0; c < C; ++c) {
            const Vector<T> w = load(v + c * COLUMNS<T> + j);
            for (int r = 0; r < ROWS; ++r) found[c][r] += k[r] * w;
            if constexpr (MIRRORED) {
                Vector<T> sum = load(sums + c * COLUMNS<T> + j);
                for (int r = 0; r < ROWS; ++r) sum += k[r] * v_of_rows[c * COLUMNS<T> + r];
                store(sum, sums + c * COLUMNS<T> + j);
            }
        }
    }
    for (int c = 0; c < C; ++c)
        for (int r = 0; r < ROWS; ++r) out[c * COLUMNS<T> + r] += total<T>(found[c][r]);
}

// Add a tile of K v to the rows' stretch of `out` and, where mirrored, of K' v to the columns'.
template <class T, bool MIRRORED>
void multiply_tile(const Factor<T>* factors, int64_t number, int64_t n, int64_t rows, int64_t columns, int64_t R, const T* v,
                   T* out, std::vector<T>& sums) {
    alignas(64) Strip<T> K, other;
    const int64_t size = R * COLUMNS<T>;
    std::fill(sums.begin(), sums.end(), T(0));  // short sums keep their digits
    for (int i = 0; i < count<T>(n, rows); i += ROWS) {
        evaluate<T, false>(factors[0], rows, i, columns, K, K);
        for (int64_t f = 1; f < number; ++f) {
            evaluate<T, false>(factors[f], rows, i, columns, other, other);
            multiply<T>(K, other);
        }
        const T *right = v + columns * size, *left = v + rows * size + i;
        T *own = out + rows * size + i, *sum = sums.data();
        int64_t c = 0;
        const auto apply_by = [&](auto number_at_a_time) {
            constexpr int C = number_at_a_time;
            for (; c + C <= R; c += C)
                apply<T, C, MIRRORED>(K, right + c * COLUMNS<T>, left + c * COLUMNS<T>, own + c * COLUMNS<T>,
                                      sum + c * COLUMNS<T>);
        };
        apply_by(std::integral_constant<int, 4>{});
        apply_by(std::integral_constant<int, 2>{});
        apply_by(std::integral_constant<int, 1>{});
    }
    if constexpr (MIRRORED) add(sums, out + columns * size);
}

template <class T>
void product(const Factor<T>* factors, int64_t number, int64_t n, int64_t rows, int64_t stretches, bool square, int64_t R, const T* v,
             T* out) {
    std::vector<T> sums(R * COLUMNS<T>);
    for (int64_t columns = square ? rows : 0; columns < stretches; ++columns)
        if (square && columns > rows)
            multiply_tile<T, true>(factors, number, n, rows, columns, R, v, out, sums);
        else
            multiply_tile<T, false>(factors, number, n, rows, columns, R, v, out, sums);
}

// ---- derivatives ----------------------------------------------------------------------------------------------------

// Add sum_j B_ij (x_i - y_j) to `by_x` and subtract sum_i B_ij (x_i - y_j) from `by_y`.
template <class T>
void add_differences(const Strip<T>& B, const T* x, const T* y, int64_t dimension, T* by_x, T* by_y) {
    for (int64_t k = 0; k < dimension; ++k, y += COLUMNS<T>, by_x += COLUMNS<T>, by_y += COLUMNS<T>) {
        Vector<T> found[ROWS] = {};
        for (int j = 0; j < COLUMNS<T>; j += LANES<T>) {
            const Vector<T> column = load(y + j);
            Vector<T> sum = load(by_y + j);
            for (int r = 0; r < ROWS; ++r) {
                const Vector<T> term = load(B[r] + j) * (x[r * dimension + k] - column);
                found[r] += term;
                sum -= term;
            }
            store(sum, by_y + j);
        }
        for (int r = 0; r < ROWS; ++r) by_x[r] += total<T>(found[r]);
    }
}

template <class T> struct alignas(64) Evaluated {
    Strip<T> value, slope;
};

// Add to `found` u' K v of a row of tiles, and to by_x and by_y of each factor the sums that its derivatives are made of.
template <class T>
void derivatives(const Factor<T>* factors, int64_t number, int64_t n, int64_t rows, int64_t stretches, bool square, int64_t R,
                 const T* u, const T* v, double* found, T* const* by_x, T* const* by_y) {
    alignas(64) Strip<T> A, B;
    std::vector<Evaluated<T>> parts(number);
    std::vector<std::vector<T>> sums;
    for (int64_t f = 0; f < number; ++f) sums.emplace_back(factors[f].dimension * COLUMNS<T>);
    const int64_t size = R * COLUMNS<T>;
    for (int64_t columns = square ? rows : 0; columns < stretches; ++columns) {
        for (auto& each : sums) std::fill(each.begin(), each.end(), T(0));
        for (int i = 0; i < count<T>(n, rows); i += ROWS) {
            // A = u v', of a square with its mirror image v u', which on the diagonal is inside too
            for (int r = 0; r < ROWS; ++r) {
                std::fill(A[r], A[r] + COLUMNS<T>, T(0));
                for (int64_t c = 0; c < size; c += COLUMNS<T>) {
                    const T *right = v + columns * size + c, *mirrored = u + columns * size + c;
                    const T share = square && columns == rows ? T(0.5) : T(1);
                    const T left = share * u[rows * size + c + i + r];
                    const T other = square ? share * v[rows * size + c + i + r] : T(0);
#pragma omp simd
                    for (int j = 0; j < COLUMNS<T>; ++j) A[r][j] += left * right[j] + (square ? other * mirrored[j] : T(0));
                }
            }
            for (int64_t f = 0; f < number; ++f)
                evaluate<T, true>(factors[f], rows, i, columns, parts[f].value, parts[f].slope);
            for (int64_t f = 0; f < number; ++f) {
                std::memcpy(B, A, sizeof B);
                for (int64_t g = 0; g < number; ++g)
                    if (g != f) multiply<T>(B, parts[g].value);
                if (f == 0) *found += inner(B, parts[0].value);
                multiply<T>(B, parts[f].slope);
                const int64_t d = factors[f].dimension, own = d * COLUMNS<T>;
                add_differences<T>(B, factors[f].x + (rows * COLUMNS<T> + i) * d, factors[f].y + columns * own, d,
                                   by_x[f] + rows * own + i, sums[f].data());
            }
        }
        for (int64_t f = 0; f < number; ++f) add(sums[f], by_y[f] + columns * factors[f].dimension * COLUMNS<T>);
    }
}

}  // namespace

#define EXPORT(T, NAME)                                                                                                \
    extern "C" void product_##NAME(const Factor<T>* factors, int64_t number, int64_t n, int64_t rows,                 \
                                   int64_t stretches, int64_t square, int64_t R, const T* v, T* out) {                \
        product<T>(factors, number, n, rows, stretches, square, R, v, out);                                           \
    }                                                                                                                 \
    extern "C" void derivatives_##NAME(const Factor<T>* factors, int64_t number, int64_t n, int64_t rows,             \
                                       int64_t stretches, int64_t square, int64_t R, const T* u, const T* v,          \
                                       double* found, T* const* by_x, T* const* by_y) {                               \
        derivatives<T>(factors, number, n, rows, stretches, square, R, u, v, found, by_x, by_y);                      \
    }
EXPORT(double, float64)
EXPORT(float, float32)
