// Tiles of radial kernel matrices, for products, entries and derivatives: see compiled_tiles.py, which packs what comes in.
//
// Inputs, vectors and sums come in stretches of COLUMNS data, the last filled up with zeros: (stretch, row, COLUMNS).
// A tile is one stretch against another, a strip of it at a time: that of the kernel matrix, then what it is for.

#include <algorithm>
#include <cstdint>
#include <thread>
#include <type_traits>
#include <vector>

#include "strips.h"

namespace {

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

    // Call work(i, columns, span) for ROWS rows at a time, the i-th of stretch `rows` on; done(columns) after each tile.
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

// Put a strip of the matrix in K.
template <class T>
inline void whole(const Matrix<T>& matrix, int64_t rows, int i, int64_t columns, Span span, Strip<T>& K, Strip<T>& other) {
    evaluate<T, false>(matrix.factors[0], rows, i, columns, span, K, K);
    for (int64_t f = 1; f < matrix.number; ++f) {
        evaluate<T, false>(matrix.factors[f], rows, i, columns, span, other, other);
        multiply<T>(K, other, span, K);
    }
}

// ---- products -------------------------------------------------------------------------------------------------------

// Add K v of C right-hand sides to `out` and, where mirrored, K' v of the rows to `sums`.
template <class T, int C>
inline void apply(const Strip<T>& K, Span span, const T* v, const T* v_of_rows, T* out, T* sums) {
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
        whole<T>(matrix, rows, i, columns, span, K, other);
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

// ---- entries --------------------------------------------------------------------------------------------------------

// Put left_i K_ij right_j of all rows and a stretch of columns in `out` (n, m), rounded.
template <class T, class Out>
void entries(const Matrix<T>& matrix, int64_t columns, const T* left, const T* right, Out* out) {
    alignas(64) Strip<T> K, other;
    const int width = Matrix<T>::count(matrix.m, columns);
    right += columns * COLUMNS<T>;
    out += columns * COLUMNS<T>;
    for (int64_t rows = 0; rows < matrix.stretches_of_rows(); ++rows) {
        const int height = Matrix<T>::count(matrix.n, rows);
        for (int i = 0; i < height; i += ROWS) {
            const Span span = matrix.span(rows, i, columns);
            whole<T>(matrix, rows, i, columns, span, K, other);
            for (int r = 0; r < std::min(ROWS, height - i); ++r) {
                const int64_t row = rows * COLUMNS<T> + i + r;
                const T own = left[row];
                Out* __restrict to = out + row * matrix.m;
                for (int j = 0; j < width; ++j) to[j] = Out(own * right[j] * K[r][j]);
            }
        }
    }
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

// Add to `found` u' K v of a stretch of rows, and to by_x and by_y of each factor what its derivatives are made of.
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
    extern "C" void entries_##NAME(const Matrix<T>* matrix, const Shares* shares, const T* left, const T* right,       \
                                   T* out) {                                                                           \
        share_out(*shares, [&](int64_t, int64_t columns) { entries(*matrix, columns, left, right, out); });            \
    }                                                                                                                  \
    extern "C" void rounded_##NAME(const Matrix<T>* matrix, const Shares* shares, const T* left, const T* right,       \
                                   float* out) {                                                                       \
        share_out(*shares, [&](int64_t, int64_t columns) { entries(*matrix, columns, left, right, out); });            \
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
