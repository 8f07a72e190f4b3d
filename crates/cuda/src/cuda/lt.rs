//! Matrix products by cuBLASLt. Every shape is searched once: the library's candidates are timed on the card, and the fastest is kept in a file.
//!
//! Matrices are row-major, cuBLASLt's are column-major: what it calls C is our C transposed, so the operands change places.
//!
//! ```text
//! C[rows, cols] = A[rows, inner] B[inner, cols] + beta C    ->    C'[cols, rows] = B' A'
//! ```
#![allow(
    clippy::missing_safety_doc,
    reason = "as in `ops`: addresses of the card's, that stay until the queue is done"
)]

use std::collections::BTreeMap;
use std::ffi::c_void;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};

use cudarc::cublaslt::sys::{self, cublasStatus_t};
use cudarc::driver::sys as driver;

use super::ops::{At, Queue, Real, Rows, arguments};
use super::{Cuda, find, lock};
use crate::driver::Driver;
use crate::{CudaError, DeviceMemory};

/// What is done to a product on its way out.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Epilogue {
    None,
    /// `+ bias`, `[cols]`, in the result's type.
    Bias {
        bias: At,
    },
    /// `gelu(x + bias)`; `x + bias` goes to `before`, `[rows, cols]`, for the gradient.
    GeluBias {
        bias: At,
        before: At,
    },
    /// `x * gelu'(before)`.
    GeluSlope {
        before: At,
    },
}

impl Epilogue {
    fn name(self) -> &'static str {
        match self {
            Epilogue::None => "",
            Epilogue::Bias { .. } => "bias",
            Epilogue::GeluBias { .. } => "gelu",
            Epilogue::GeluSlope { .. } => "dgelu",
        }
    }

    fn code(self) -> sys::cublasLtEpilogue_t {
        use sys::cublasLtEpilogue_t as E;
        match self {
            Epilogue::None => E::CUBLASLT_EPILOGUE_DEFAULT,
            Epilogue::Bias { .. } => E::CUBLASLT_EPILOGUE_BIAS,
            Epilogue::GeluBias { .. } => E::CUBLASLT_EPILOGUE_GELU_AUX_BIAS,
            Epilogue::GeluSlope { .. } => E::CUBLASLT_EPILOGUE_DGELU,
        }
    }
}

/// A product of row-major matrices.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Product {
    pub rows: u64,
    pub cols: u64,
    pub inner: u64,
    /// A is stored as `[inner, rows]`.
    pub a_transposed: bool,
    /// B is stored as `[cols, inner]`.
    pub b_transposed: bool,
    pub real: Real,
    pub result: Real,
    pub alpha: f32,
    /// What is there counts this much.
    pub beta: f32,
    pub epilogue: Epilogue,
    /// Where rows are further apart than they are long, or there are several products.
    pub lay: Option<Lay>,
}

/// How the matrices of several products lie: of each operand and the result, elements from row to row (as stored) and from product to product.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Lay {
    pub count: u32,
    pub a: (u64, u64),
    pub b: (u64, u64),
    pub c: (u64, u64),
}

impl Product {
    /// `c = a b`, of numbers and into numbers of one sort.
    pub fn new(rows: u64, cols: u64, inner: u64, real: Real) -> Self {
        let (a_transposed, b_transposed, result) = (false, false, real);
        let (alpha, beta, epilogue, lay) = (1.0, 0.0, Epilogue::None, None);
        Self { rows, cols, inner, a_transposed, b_transposed, real, result, alpha, beta, epilogue, lay }
    }

    /// How its matrices lie: rows of A, B and C as they are stored.
    fn lay(&self) -> Lay {
        let Self { rows, cols, inner, a_transposed, b_transposed, .. } = *self;
        let a = if a_transposed { rows } else { inner };
        let b = if b_transposed { inner } else { cols };
        self.lay.unwrap_or(Lay { count: 1, a: (a, 0), b: (b, 0), c: (cols, 0) })
    }

    /// All that decides which algorithm is fastest.
    fn key(&self, card: &str, version: usize, aligned: [u32; 3]) -> String {
        let order = |transposed| if transposed { 't' } else { 'n' };
        let lay = match self.lay {
            None => String::new(),
            Some(Lay { count, a, b, c }) => {
                format!(" {count} of {}+{},{}+{},{}+{}", a.0, a.1, b.0, b.1, c.0, c.1)
            }
        };
        let aligned = match aligned {
            [256, 256, 256] => String::new(),
            [a, b, c] => format!(" at {a},{b},{c}"),
        };
        format!(
            "{card} {version} {}x{}x{} {}{} {}>{} {} {}{lay}{aligned}",
            self.rows,
            self.cols,
            self.inner,
            order(self.a_transposed),
            order(self.b_transposed),
            self.real.name(),
            self.result.name(),
            if self.beta == 0.0 { "set" } else { "add" },
            self.epilogue.name()
        )
    }

    pub fn flops(&self) -> f64 {
        2.0 * self.rows as f64 * self.cols as f64 * self.inner as f64 * f64::from(self.lay().count)
    }
}

/// How an algorithm is chosen where none is known.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Choice {
    /// The library's first: the same in every run.
    First,
    /// The fastest of its candidates, by the clock.
    Timed,
}

/// See the module.
#[derive(Debug)]
pub struct Products {
    cuda: Arc<Cuda>,
    handle: super::Shared<sys::cublasLtHandle_t>,
    version: usize,
    workspace: Arc<DeviceMemory>,
    choices: Mutex<BTreeMap<String, [u64; 8]>>,
    choice: Choice,
    file: Option<PathBuf>,
}

/// What an address is a multiple of, up to what algorithms ask for.
fn alignment(at: At) -> u32 {
    if at == 0 { 256 } else { 1 << at.trailing_zeros().min(8) }
}

fn data_type(real: Real) -> sys::cudaDataType {
    match real {
        Real::F32 => sys::cudaDataType_t::CUDA_R_32F,
        Real::Bf16 => sys::cudaDataType_t::CUDA_R_16BF,
    }
}

macro_rules! lt {
    ($cuda:expr, $function:ident ( $($argument:expr),* )) => {
        match unsafe { sys::$function($($argument),*) } {
            cublasStatus_t::CUBLAS_STATUS_SUCCESS => Ok(()),
            code => Err(CudaError::Call {
                call: stringify!($function),
                name: $cuda.card().name.clone(),
                why: format!("{code:?}"),
            }),
        }
    };
}

/// What cuBLASLt calls a product. Goes with the value.
struct Described {
    operation: sys::cublasLtMatmulDesc_t,
    layouts: [sys::cublasLtMatrixLayout_t; 3],
}

impl Drop for Described {
    fn drop(&mut self) {
        // SAFETY: made by `describe`, or null.
        unsafe {
            for layout in self.layouts.into_iter().filter(|layout| !layout.is_null()) {
                sys::cublasLtMatrixLayoutDestroy(layout);
            }
            if !self.operation.is_null() {
                sys::cublasLtMatmulDescDestroy(self.operation);
            }
        }
    }
}

/// How many candidates are timed, and how often each.
const CANDIDATES: usize = 24;
const TIMES: u32 = 8;

impl Products {
    /// `workspace` is memory that algorithms may use: 64 MiB does. Choices are read from a file, and written to it.
    pub fn new(
        cuda: &Arc<Cuda>,
        workspace: &Arc<DeviceMemory>,
        choice: Choice,
        file: Option<&Path>,
    ) -> Result<Self, CudaError> {
        let version = find::cublaslt()?;
        cuda.enter()?;
        let mut handle = std::ptr::null_mut();
        lt!(cuda, cublasLtCreate(&raw mut handle))?;
        let kept =
            file.filter(|_| choice == Choice::Timed).and_then(|path| std::fs::read_to_string(path).ok());
        // A file that is damaged costs a search, nothing else.
        let choices = kept.and_then(|text| serde_json::from_str(&text).ok()).unwrap_or_default();
        let file = file.filter(|_| choice == Choice::Timed).map(Path::to_path_buf);
        Ok(Self {
            cuda: Arc::clone(cuda),
            handle: super::Shared(handle),
            version,
            workspace: Arc::clone(workspace),
            choice,
            choices: Mutex::new(choices),
            file,
        })
    }

    pub fn version(&self) -> usize {
        self.version
    }

    fn describe(&self, product: &Product) -> Result<Described, CudaError> {
        use sys::cublasLtMatmulDescAttributes_t as D;
        let Product { rows, cols, inner, a_transposed, b_transposed, real, result, epilogue, .. } = *product;
        let mut described = Described { operation: std::ptr::null_mut(), layouts: [std::ptr::null_mut(); 3] };
        let f32 = sys::cudaDataType_t::CUDA_R_32F;
        let compute = sys::cublasComputeType_t::CUBLAS_COMPUTE_32F;
        lt!(self.cuda, cublasLtMatmulDescCreate(&raw mut described.operation, compute, f32))?;
        let set = |which, value: *const c_void, bytes| {
            lt!(self.cuda, cublasLtMatmulDescSetAttribute(described.operation, which, value, bytes))
        };
        // CUBLAS_OP_N and CUBLAS_OP_T, which the bindings leave out.
        let (first, second) = (i32::from(b_transposed), i32::from(a_transposed));
        set(D::CUBLASLT_MATMUL_DESC_TRANSA, (&raw const first).cast(), size_of_val(&first))?;
        set(D::CUBLASLT_MATMUL_DESC_TRANSB, (&raw const second).cast(), size_of_val(&second))?;
        let code = epilogue.code();
        set(D::CUBLASLT_MATMUL_DESC_EPILOGUE, (&raw const code).cast(), size_of_val(&code))?;
        if let Epilogue::Bias { bias } | Epilogue::GeluBias { bias, .. } = epilogue {
            set(D::CUBLASLT_MATMUL_DESC_BIAS_POINTER, (&raw const bias).cast(), 8)?;
            let kind = data_type(result);
            set(D::CUBLASLT_MATMUL_DESC_BIAS_DATA_TYPE, (&raw const kind).cast(), size_of_val(&kind))?;
        }
        if let Epilogue::GeluBias { before, .. } | Epilogue::GeluSlope { before } = epilogue {
            set(D::CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_POINTER, (&raw const before).cast(), 8)?;
            set(D::CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_LD, (&raw const cols).cast(), 8)?;
        }
        let lay = product.lay();
        // Stored sizes, column-major: a row-major [r, c] is a column-major [c, r].
        let stored = |transposed: bool, (r, c): (u64, u64)| if transposed { (r, c) } else { (c, r) };
        let sizes = [
            (stored(b_transposed, (inner, cols)), real, lay.b),
            (stored(a_transposed, (rows, inner)), real, lay.a),
            ((cols, rows), result, lay.c),
        ];
        for (layout, ((height, width), real, (apart, stride))) in described.layouts.iter_mut().zip(sizes) {
            let apart = apart.max(height) as i64;
            lt!(
                self.cuda,
                cublasLtMatrixLayoutCreate(&raw mut *layout, data_type(real), height, width, apart)
            )?;
            if lay.count > 1 {
                use sys::cublasLtMatrixLayoutAttribute_t as L;
                let (count, stride) = (lay.count as i32, stride as i64);
                let of_count: (*const c_void, usize) = ((&raw const count).cast(), size_of_val(&count));
                let of_stride: (*const c_void, usize) = ((&raw const stride).cast(), size_of_val(&stride));
                for (which, (value, bytes)) in [
                    (L::CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT, of_count),
                    (L::CUBLASLT_MATRIX_LAYOUT_STRIDED_BATCH_OFFSET, of_stride),
                ] {
                    lt!(self.cuda, cublasLtMatrixLayoutSetAttribute(*layout, which, value, bytes))?;
                }
            }
        }
        Ok(described)
    }

    /// `c = a b`, with what the product says.
    pub unsafe fn multiply(
        &self,
        queue: &Queue,
        product: &Product,
        (a, b): (At, At),
        c: At,
    ) -> Result<(), CudaError> {
        let described = self.describe(product)?;
        let aligned = [a, b, c].map(alignment);
        let key = product.key(&self.cuda.card().name, self.version, aligned);
        let known = lock(&self.choices).get(&key).copied();
        let data = match known {
            Some(data) => data,
            // Results that are added to and do not lie in one piece are not timed: that would want a copy of all of it.
            None if self.choice == Choice::First || (product.beta != 0.0 && product.lay.is_some()) => {
                let first = self.candidates(product, &described, aligned)?[0];
                lock(&self.choices).insert(key, first);
                first
            }
            // SAFETY: as the caller says. Timing overwrites `c`; what was there is added to once, below.
            None => unsafe { self.search(queue, product, &described, (a, b), c, &key)? },
        };
        let algorithm = sys::cublasLtMatmulAlgo_t { data };
        // SAFETY: as the caller says.
        unsafe { self.run(queue.stream(), product, &described, &algorithm, (a, b), c) }
    }

    /// The same by a plain kernel of our own where the library has no algorithm.
    pub unsafe fn multiply_any(
        &self,
        queue: &Queue,
        product: &Product,
        operands: (At, At),
        c: At,
    ) -> Result<(), CudaError> {
        let known = product.inner > 0 && product.rows > 0 && product.cols > 0;
        // SAFETY: as the caller says.
        match known.then(|| unsafe { self.multiply(queue, product, operands, c) }) {
            None | Some(Err(CudaError::Refused { .. })) => unsafe { plain(queue, product, operands, c) },
            Some(done) => done,
        }
    }

    unsafe fn run(
        &self,
        stream: driver::CUstream,
        product: &Product,
        described: &Described,
        algorithm: &sys::cublasLtMatmulAlgo_t,
        (a, b): (At, At),
        c: At,
    ) -> Result<(), CudaError> {
        let (alpha, beta) = (product.alpha, product.beta);
        let [first, second, out] = described.layouts;
        let at = |address: At| address as usize as *mut c_void;
        let space = (at(self.workspace.address()), self.workspace.bytes() as usize);
        lt!(
            self.cuda,
            cublasLtMatmul(
                self.handle.0,
                described.operation,
                (&raw const alpha).cast(),
                at(b),
                first,
                at(a),
                second,
                (&raw const beta).cast(),
                at(c),
                out,
                at(c),
                out,
                &raw const *algorithm,
                space.0,
                space.1,
                stream.cast()
            )
        )
    }

    /// The library's candidates, best guess first.
    fn candidates(
        &self,
        product: &Product,
        described: &Described,
        [a, b, c]: [u32; 3],
    ) -> Result<Vec<[u64; 8]>, CudaError> {
        let mut preference = std::ptr::null_mut();
        lt!(self.cuda, cublasLtMatmulPreferenceCreate(&raw mut preference))?;
        let (bytes, which) = (
            self.workspace.bytes() as usize,
            sys::cublasLtMatmulPreferenceAttributes_t::CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES,
        );
        let mut set = lt!(
            self.cuda,
            cublasLtMatmulPreferenceSetAttribute(preference, which, (&raw const bytes).cast(), 8)
        );
        // What the library calls A is our B, and the other way round.
        use sys::cublasLtMatmulPreferenceAttributes_t as P;
        for (which, least) in [
            (P::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, b),
            (P::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, a),
            (P::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, c),
            (P::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, c),
            // Sums over parts of the depth in the type that is computed with: in the result's, bf16 would be rounded more than once.
            (P::CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK, 2),
        ] {
            set = set.and_then(|()| {
                lt!(
                    self.cuda,
                    cublasLtMatmulPreferenceSetAttribute(preference, which, (&raw const least).cast(), 4)
                )
            });
        }
        // SAFETY: plain numbers.
        let mut found: [sys::cublasLtMatmulHeuristicResult_t; CANDIDATES] = unsafe { std::mem::zeroed() };
        let (mut count, [first, second, out]) = (0, described.layouts);
        let asked = set.and_then(|()| {
            lt!(
                self.cuda,
                cublasLtMatmulAlgoGetHeuristic(
                    self.handle.0,
                    described.operation,
                    first,
                    second,
                    out,
                    out,
                    preference,
                    CANDIDATES as i32,
                    found.as_mut_ptr(),
                    &raw mut count
                )
            )
        });
        // SAFETY: made above.
        unsafe { sys::cublasLtMatmulPreferenceDestroy(preference) };
        // A product that it does not know is no failure of the card: who asks for it may compute it otherwise.
        if asked.is_err() || count == 0 {
            return Err(CudaError::Refused {
                what: "a product",
                found: product.key("", 0, [a, b, c]),
                needed: "sizes and alignments that cuBLASLt has an algorithm for (16 bytes)",
            });
        }
        Ok(found[..count as usize].iter().map(|result| result.algo.data).collect())
    }

    /// Times the candidates, and keeps the fastest. Results of products that are added to are not changed by it.
    unsafe fn search(
        &self,
        queue: &Queue,
        product: &Product,
        described: &Described,
        operands: (At, At),
        c: At,
        key: &str,
    ) -> Result<[u64; 8], CudaError> {
        let (a, b) = operands;
        let candidates = self.candidates(product, described, [a, b, c].map(alignment))?;
        // What is added to must not be added to eight times: the timing goes into a copy of it.
        let bytes = product.rows * product.cols * product.result.bytes();
        let scratch = match product.beta != 0.0 {
            true => Some(self.cuda.allocate(bytes, false)?),
            false => None,
        };
        let into = scratch.as_ref().map_or(c, |scratch| scratch.address);
        if into != c {
            // SAFETY: as the caller says; scratch memory is as large as the result, and freed when the queue is done.
            let code = unsafe { driver::cuMemcpyDtoDAsync_v2(into, c, bytes as usize, queue.stream()) };
            if code != driver::CUresult::CUDA_SUCCESS {
                scratch.into_iter().for_each(|scratch| self.cuda.free(scratch));
                return Err(self.cuda.failed("cuMemcpyDtoDAsync", code));
            }
        }
        let mut best: Option<(f64, [u64; 8])> = None;
        let mut refused = None;
        for data in candidates {
            let algorithm = sys::cublasLtMatmulAlgo_t { data };
            // SAFETY: as the caller says; scratch memory is as large as the result.
            let run = || unsafe { self.run(queue.stream(), product, described, &algorithm, operands, into) };
            match run().and_then(|()| queue.time(TIMES, run)) {
                Ok(seconds) if best.is_none_or(|(fastest, _)| seconds < fastest) => {
                    best = Some((seconds, data))
                }
                Ok(_) => {}
                Err(error) => refused = Some(error),
            }
        }
        if let Some(scratch) = scratch {
            queue.finish()?;
            self.cuda.free(scratch);
        }
        let Some((_, data)) = best else { return Err(refused.expect("there was a candidate")) };
        let mut choices = lock(&self.choices);
        choices.insert(key.into(), data);
        if let Some(file) = &self.file {
            let text = serde_json::to_string_pretty(&*choices).expect("text and numbers");
            // Whole or not at all; a file that cannot be written costs a search next time.
            let part = file.with_extension(format!("{}.part", std::process::id()));
            let folder = file.parent().map_or(Ok(()), std::fs::create_dir_all);
            let _kept =
                folder.and_then(|()| std::fs::write(&part, text)).and_then(|()| std::fs::rename(&part, file));
        }
        Ok(data)
    }
}

/// As `product.cu` has it: elements from row to row, column to column, product to product.
#[derive(Debug, Clone, Copy)]
#[repr(C)]
struct Operand {
    base: At,
    row: u64,
    col: u64,
    next: u64,
}

/// A product by our own kernel; a bias is added by another.
unsafe fn plain(queue: &Queue, product: &Product, (a, b): (At, At), c: At) -> Result<(), CudaError> {
    let Product { a_transposed, b_transposed, alpha, beta, epilogue, .. } = *product;
    let lay = product.lay();
    let operand = |base, transposed, (apart, next)| match transposed {
        false => Operand { base, row: apart, col: 1, next },
        true => Operand { base, row: 1, col: apart, next },
    };
    let (a, b) = (operand(a, a_transposed, lay.a), operand(b, b_transposed, lay.b));
    let into = operand(c, false, lay.c);
    let [rows, cols, inner] = [product.rows, product.cols, product.inner].map(|n| n as u32);
    let name = format!("multiply_{}_{}", product.real.name(), product.result.name());
    let blocks = rows.div_ceil(32) * cols.div_ceil(32);
    let mut arguments = arguments![a, b, into, rows, cols, inner, alpha, beta];
    // SAFETY: as the caller says.
    unsafe {
        queue.launch(("product", &name), (blocks, lay.count), (256, 0), &mut arguments)?;
        match epilogue {
            Epilogue::None => Ok(()),
            Epilogue::Bias { bias } => queue.add_bias(product.result, Rows { rows, cols }, bias, c),
            Epilogue::GeluBias { .. } | Epilogue::GeluSlope { .. } => Err(CudaError::Refused {
                what: "a product with gelu behind it",
                found: product.key("", 0, [256; 3]),
                needed: "sizes and alignments that cuBLASLt has an algorithm for (16 bytes)",
            }),
        }
    }
}

impl Drop for Products {
    fn drop(&mut self) {
        // SAFETY: made by `new`.
        unsafe { sys::cublasLtDestroy(self.handle.0) };
    }
}

impl Queue {
    /// Seconds that a call takes on the card, in the mean of `times`.
    pub fn time(
        &self,
        times: u32,
        mut call: impl FnMut() -> Result<(), CudaError>,
    ) -> Result<f64, CudaError> {
        let cuda = self.cuda();
        let check = |call, code| match code {
            driver::CUresult::CUDA_SUCCESS => Ok(()),
            code => Err(cuda.failed(call, code)),
        };
        let (mut events, mut milliseconds) = ([std::ptr::null_mut(); 2], 0.0f32);
        // SAFETY: events of ours, made, recorded in our stream, waited for and destroyed here.
        unsafe {
            for event in &mut events {
                check("cuEventCreate", driver::cuEventCreate(&raw mut *event, 0))?;
            }
            check("cuEventRecord", driver::cuEventRecord(events[0], self.stream()))?;
            let called = (0..times).try_for_each(|_| call());
            check("cuEventRecord", driver::cuEventRecord(events[1], self.stream()))?;
            check("cuEventSynchronize", driver::cuEventSynchronize(events[1]))?;
            let elapsed = driver::cuEventElapsedTime_v2(&raw mut milliseconds, events[0], events[1]);
            for event in events {
                driver::cuEventDestroy_v2(event);
            }
            called?;
            check("cuEventElapsedTime", elapsed)?;
        }
        Ok(f64::from(milliseconds) / 1e3 / f64::from(times))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_choice_is_kept_by_all_that_decides_it() {
        let product =
            Product { a_transposed: true, result: Real::F32, beta: 1.0, ..Product::new(3, 5, 7, Real::Bf16) };
        let key = |product: &Product, at: [At; 3]| product.key("H200", 130_100, at.map(alignment));
        assert_eq!(key(&product, [256, 512, 0]), "H200 130100 3x5x7 tn bf16>f32 add ");
        assert_eq!(key(&product, [256, 16, 2]), "H200 130100 3x5x7 tn bf16>f32 add  at 256,16,2");
        assert_eq!(product.flops(), 210.0);
        let lay = Lay { count: 4, a: (9, 3), b: (15, 5), c: (5, 15) };
        let several = Product { lay: Some(lay), ..product };
        assert_eq!(key(&several, [0; 3]), "H200 130100 3x5x7 tn bf16>f32 add  4 of 9+3,15+5,5+15");
        assert_eq!(several.flops(), 840.0);
    }
}
