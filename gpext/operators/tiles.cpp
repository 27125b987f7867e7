// Tiles of radial kernel matrices, for products and derivatives: see compiled_tiles.py, which packs what comes in.
//
// Inputs, vectors and sums come in stretches of COLUMNS data, the last one filled up with zeros: (stretch, row, COLUMNS).
// A tile is one stretch against another, taken ROWS at a time: squared distances, then the profile, then what they are
// for. All three are bound by arithmetic: sums and exponentials that do not wait for each other keep the processor busy.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <thread>
#include <type_traits>
#include <vector>

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

// ---- tiles ----------------------------------------------------------------------------------------------------------

// A kernel matrix: of a square, a tile beyond the diagonal serves its mirror image as well.
template <class T> struct Matrix {
    const Factor<T>* factors;
    int64_t number, n, m, square;

    // How many of `size` are in a stretch.
    static int count(int64_t size, int64_t stretch) {
        return int(std::min<int64_t>(COLUMNS<T>, size - stretch * COLUMNS<T>));
    }
    int64_t stretches_of_rows() const { return (n + COLUMNS<T> - 1) / COLUMNS<T>; }
    int64_t stretches() const { return (m + COLUMNS<T> - 1) / COLUMNS<T>; }

    Span span(int64_t rows, int i, int64_t columns) const {
        const int stop = (count(m, columns) + BLOCK<T> - 1) / BLOCK<T> * BLOCK<T>;
        if (!square) return {0, stop, stop};
        const int first = rows == columns ? i / BLOCK<T> * BLOCK<T> : 0;
        return {first, rows == columns ? first + BLOCK<T> : 0, stop};
    }

    // Call work(i, columns, span) for ROWS rows at a time from the i-th of stretch `rows` on, done(columns) after each tile.
    template <class Work, class Done> void visit(int64_t rows, const Work& work, const Done& done) const {
        for (int64_t columns = square ? rows : 0; columns < stretches(); ++columns) {
            for (int i = 0; i < count(n, rows); i += ROWS) work(i, columns, span(rows, i, columns));
            done(columns);
        }
    }
};

template <class T> inline void multiply(const Strip<T>& a, const Strip<T>& b, Span span, Strip<T>& out) {
    for (int r = 0; r < ROWS; ++r)
        for (int j = span.first; j < span.stop; j += LANES<T>) store<T>(load(a[r] + j) * load(b[r] + j), out[r] + j);
}

// Sums of a tile (row, COLUMNS): short ones keep their digits.
template <class T> struct alignas(64) Sums {
    T at[COLUMNS<T>];
};

// Add sums to `to` and start anew.
template <class T> inline void add(std::vector<Sums<T>>& sums, T* to) {
    for (auto& row : sums)
        for (T& sum : row.at) {
            *to++ += sum;
            sum = 0;
        }
}

// Which stretches of rows to visit, and by how many threads.
struct Shares {
    int64_t threads, number;
    const int64_t* starts;
};

// Call work(k, start) by each thread k for its share of the starts, of which the first take longest of a square.
// OpenMP's threads, since torch has them waiting, which takes a processor from any others.
template <class Work> void share_out(const Shares& shares, const Work& work) {
    const int64_t threads = shares.threads;
    const auto share = [&](int64_t k) {
        for (int64_t p = 0; p < shares.number; ++p)
            if (p % (2 * threads) == k || p % (2 * threads) == 2 * threads - 1 - k) work(k, shares.starts[p]);
    };
#ifdef _OPENMP
#pragma omp parallel for num_threads(int(threads)) schedule(static, 1)
    for (int64_t k = 0; k < threads; ++k) share(k);
#else
    std::vector<std::thread> others;
    for (int64_t k = 1; k < threads; ++k) others.emplace_back(share, k);
    share(0);
    for (auto& other : others) other.join();
#endif
}

// ---- products -------------------------------------------------------------------------------------------------------

// Add K v of C right-hand sides to `out` and, where mirrored, K' v of the rows to `sums`.
template <class T, int C> inline void apply(const Strip<T>& K, Span span, const T* v, const T* v_of_rows, T* out, T* sums) {
    Vector<T> found[C][ROWS] = {}, left[C][ROWS];
    for (int c = 0; c < C; ++c)
        for (int r = 0; r < ROWS; ++r) left[c][r] = Vector<T>{} + v_of_rows[c * COLUMNS<T> + r];
    const auto add = [&](int j, auto mirrored) {
        Vector<T> k[ROWS];
        for (int r = 0; r < ROWS; ++r) k[r] = load(K[r] + j);
        for (int c = 0; c < C; ++c) {
            const Vector<T> right = load(v + c * COLUMNS<T> + j);
            for (int r = 0; r < ROWS; ++r) found[c][r] += k[r] * right;
            if constexpr (mirrored) {
                Vector<T> sum = load(sums + c * COLUMNS<T> + j);
                for (int r = 0; r < ROWS; ++r) sum += k[r] * left[c][r];
                store<T>(sum, sums + c * COLUMNS<T> + j);
            }
        }
    };
    for (int j = span.first; j < span.mirrored; j += LANES<T>) add(j, std::false_type{});
    for (int j = span.mirrored; j < span.stop; j += LANES<T>) add(j, std::true_type{});
    for (int c = 0; c < C; ++c)
        for (int r = 0; r < ROWS; ++r) out[c * COLUMNS<T> + r] += total<T>(found[c][r]);
}

// Add K v of a stretch of rows, and of a square what the rest of it adds to further ones, to `out`.
template <class T> void product(const Matrix<T>& matrix, int64_t rows, int64_t R, const T* v, T* out) {
    alignas(64) Strip<T> K, other;
    const int64_t size = R * COLUMNS<T>;
    std::vector<Sums<T>> sums(R);
    const auto work = [&](int i, int64_t columns, Span span) {
        evaluate<T, false>(matrix.factors[0], rows, i, columns, span, K, K);
        for (int64_t f = 1; f < matrix.number; ++f) {
            evaluate<T, false>(matrix.factors[f], rows, i, columns, span, other, other);
            multiply<T>(K, other, span, K);
        }
        const T *right = v + columns * size, *left = v + rows * size + i;
        T *own = out + rows * size + i, *sum = sums.data()->at;
        int64_t c = 0;
        const auto apply_by = [&](auto number_at_a_time) {
            constexpr int C = number_at_a_time;
            for (; c + C <= R; c += C)
                apply<T, C>(K, span, right + c * COLUMNS<T>, left + c * COLUMNS<T>, own + c * COLUMNS<T>,
                            sum + c * COLUMNS<T>);
        };
        apply_by(std::integral_constant<int, 2>{});
        apply_by(std::integral_constant<int, 1>{});
    };
    matrix.visit(rows, work, [&](int64_t columns) {
        if (matrix.square) add(sums, out + columns * size);
    });
}

// ---- derivatives ----------------------------------------------------------------------------------------------------

// Put A = u v' and, where mirrored, the mirror image's v u' with it.
template <class T>
void outer(const T* u_of_rows, const T* v_of_rows, const T* u, const T* v, int64_t size, Span span, Strip<T>& A) {
    for (int j = span.first; j < span.stop; j += BLOCK<T>) {
        Vector<T> a[ROWS][ABREAST] = {};
        const auto add = [&](const T* left, const T* right) {
#pragma GCC unroll 4
            for (int i = 0; i < ABREAST; ++i) {
                const Vector<T> w = load(right + j + i * LANES<T>);
#pragma GCC unroll 4
                for (int r = 0; r < ROWS; ++r) a[r][i] += left[r] * w;
            }
        };
        for (int64_t c = 0; c < size; c += COLUMNS<T>) {
            add(u_of_rows + c, v + c);
            if (j >= span.mirrored) add(v_of_rows + c, u + c);
        }
#pragma GCC unroll 4
        for (int r = 0; r < ROWS; ++r)
#pragma GCC unroll 4
            for (int i = 0; i < ABREAST; ++i) store<T>(a[r][i], A[r] + j + i * LANES<T>);
    }
}

template <class T> inline double inner(const Strip<T>& a, const Strip<T>& b, Span span) {
    Vector<T> sum[ROWS] = {};
    for (int j = span.first; j < span.stop; j += LANES<T>)
        for (int r = 0; r < ROWS; ++r) sum[r] += load(a[r] + j) * load(b[r] + j);
    double all = 0;
    for (int r = 0; r < ROWS; ++r) all += total<T>(sum[r]);
    return all;
}

// Add sum_j B_ij (x_i - y_j) to `by_x` and subtract sum_i B_ij (x_i - y_j) from `by_y`.
template <class T>
void add_differences(const Strip<T>& B, Span span, const T* x, const T* y, int64_t dimension, T* by_x, T* by_y) {
    for (int64_t k = 0; k < dimension; ++k, y += COLUMNS<T>, by_x += COLUMNS<T>, by_y += COLUMNS<T>) {
        Vector<T> found[ROWS] = {}, row[ROWS];
        for (int r = 0; r < ROWS; ++r) row[r] = Vector<T>{} + x[r * dimension + k];
        for (int j = span.first; j < span.stop; j += LANES<T>) {
            const Vector<T> column = load(y + j);
            Vector<T> sum = load(by_y + j);
            for (int r = 0; r < ROWS; ++r) {
                const Vector<T> b = load(B[r] + j), difference = row[r] - column;
                found[r] += b * difference;
                sum -= b * difference;
            }
            store<T>(sum, by_y + j);
        }
        for (int r = 0; r < ROWS; ++r) by_x[r] += total<T>(found[r]);
    }
}

template <class T> struct alignas(64) Evaluated {
    Strip<T> value, slope;
};

// Add to `found` u' K v of a stretch of rows, and to by_x and by_y of each factor the sums that its derivatives are made of.
template <class T>
void derivatives(const Matrix<T>& matrix, int64_t rows, int64_t R, const T* u, const T* v, double& found,
                 const std::vector<T*>& by_x, const std::vector<T*>& by_y) {
    alignas(64) Strip<T> A, B;
    std::vector<Evaluated<T>> parts(matrix.number);
    std::vector<std::vector<Sums<T>>> sums;
    for (int64_t f = 0; f < matrix.number; ++f) sums.emplace_back(matrix.factors[f].dimension);
    const int64_t size = R * COLUMNS<T>;
    const auto work = [&](int i, int64_t columns, Span span) {
        const int64_t own = rows * size + i, other = columns * size;
        outer<T>(u + own, v + own, u + other, v + other, size, span, A);
        for (int64_t f = 0; f < matrix.number; ++f)
            evaluate<T, true>(matrix.factors[f], rows, i, columns, span, parts[f].value, parts[f].slope);
        for (int64_t f = 0; f < matrix.number; ++f) {
            const auto& [profile, d, x, y] = matrix.factors[f];
            multiply<T>(A, parts[f].slope, span, B);
            for (int64_t g = 0; g < matrix.number; ++g)
                if (g != f) multiply<T>(B, parts[g].value, span, B);
            const int64_t width = d * COLUMNS<T>;
            add_differences<T>(B, span, x + (rows * COLUMNS<T> + i) * d, y + columns * width, d,
                               by_x[f] + rows * width + i, sums[f][0].at);
        }
        for (int64_t f = 1; f < matrix.number; ++f) multiply<T>(parts[0].value, parts[f].value, span, parts[0].value);
        found += inner<T>(A, parts[0].value, span);
    };
    matrix.visit(rows, work, [&](int64_t columns) {
        for (int64_t f = 0; f < matrix.number; ++f)
            add(sums[f], by_y[f] + columns * matrix.factors[f].dimension * COLUMNS<T>);
    });
}

// Return where thread k has its sums of each factor, (stretches, dimension, COLUMNS).
template <class T>
std::vector<T*> own(const Matrix<T>& matrix, int64_t k, int64_t stretches, T* const* sums) {
    std::vector<T*> all;
    for (int64_t f = 0; f < matrix.number; ++f)
        all.push_back(sums[f] + k * stretches * matrix.factors[f].dimension * COLUMNS<T>);
    return all;
}

}  // namespace

// Results are each thread's own, (threads, ...): what they add up to does not depend on which one was quicker.
#define EXPORT(T, NAME)                                                                                                \
    extern "C" void product_##NAME(const Matrix<T>* matrix, const Shares* shares, int64_t R, const T* v, T* out) {     \
        const int64_t size = matrix->stretches_of_rows() * R * COLUMNS<T>;                                             \
        share_out(*shares, [&](int64_t k, int64_t rows) { product<T>(*matrix, rows, R, v, out + k * size); });         \
    }                                                                                                                  \
    extern "C" void derivatives_##NAME(const Matrix<T>* matrix, const Shares* shares, int64_t R, const T* u,           \
                                       const T* v, double* found, T* const* by_x, T* const* by_y) {                    \
        share_out(*shares, [&](int64_t k, int64_t rows) {                                                              \
            derivatives<T>(*matrix, rows, R, u, v, found[k], own<T>(*matrix, k, matrix->stretches_of_rows(), by_x),    \
                           own<T>(*matrix, k, matrix->stretches(), by_y));                                             \
        });                                                                                                            \
    }
EXPORT(double, float64)
EXPORT(float, float32)
