//! TensorFlow's C interface (`tensorflow/c/{kernels,ops,tf_tensor,tf_status}.h`), resolved by symbol names.

use std::ffi::{CStr, CString, c_char, c_int, c_void};
use std::sync::OnceLock;

/// Address of an object of TensorFlow.
pub(crate) type Opaque = *mut c_void;

pub(crate) type Create = unsafe extern "C" fn(construction: Opaque) -> *mut c_void;
pub(crate) type Compute = unsafe extern "C" fn(kernel: *mut c_void, context: Opaque);
pub(crate) type Delete = unsafe extern "C" fn(kernel: *mut c_void);
pub(crate) type Infer = unsafe extern "C" fn(context: Opaque, status: Opaque);
pub(crate) type Dealloc = unsafe extern "C" fn(data: *mut c_void, bytes: usize, arg: *mut c_void);

/// `TF_Code`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(i32)]
pub(crate) enum Code {
    Ok = 0,
    Cancelled = 1,
    InvalidArgument = 3,
    DeadlineExceeded = 4,
    FailedPrecondition = 9,
    Internal = 13,
    DataLoss = 15,
}

/// Libraries that may contain the functions, newest layout last.
const LIBRARIES: [&CStr; 4] = [
    c"libtensorflow_framework.so.2",
    c"libtensorflow_cc.so.2",
    c"_pywrap_tensorflow_common.so",
    c"libtensorflow.so.2",
];

macro_rules! interface {
    ($($name:ident($($arg:ty),*) $(-> $result:ty)?;)*) => {
        /// The functions of the interface.
        #[expect(non_snake_case, reason = "TensorFlow's names")]
        pub(crate) struct Interface { $(pub(crate) $name: unsafe extern "C" fn($($arg),*) $(-> $result)?),* }

        impl Interface {
            fn find(handles: &[*mut c_void]) -> Result<Self, String> {
                Ok(Self { $($name: {
                    let found = find(handles, stringify!($name))?;
                    // SAFETY: the type matches the function of this name in TensorFlow's headers; function pointers have
                    // the size of data pointers on the supported platforms.
                    unsafe { std::mem::transmute::<*mut c_void, unsafe extern "C" fn($($arg),*) $(-> $result)?>(found) }
                }),* })
            }
        }
    };
}

interface! {
    TF_NewStatus() -> Opaque;
    TF_DeleteStatus(Opaque);
    TF_SetStatus(Opaque, c_int, *const c_char);
    TF_GetCode(Opaque) -> c_int;
    TF_Message(Opaque) -> *const c_char;
    TF_NewOpDefinitionBuilder(*const c_char) -> Opaque;
    TF_OpDefinitionBuilderAddAttr(Opaque, *const c_char);
    TF_OpDefinitionBuilderAddInput(Opaque, *const c_char);
    TF_OpDefinitionBuilderAddOutput(Opaque, *const c_char);
    TF_OpDefinitionBuilderSetIsStateful(Opaque, bool);
    TF_OpDefinitionBuilderSetShapeInferenceFunction(Opaque, Infer);
    TF_ShapeInferenceContextSetUnknownShape(Opaque, Opaque);
    TF_RegisterOpDefinition(Opaque, Opaque);
    TF_NewKernelBuilder(*const c_char, *const c_char, Create, Compute, Delete) -> Opaque;
    TF_KernelBuilder_HostMemory(Opaque, *const c_char);
    TF_RegisterKernelBuilder(*const c_char, Opaque, Opaque);
    TF_OpKernelConstruction_GetAttrInt64(Opaque, *const c_char, *mut i64, Opaque);
    TF_OpKernelConstruction_Failure(Opaque, Opaque);
    TF_OpKernelContext_Failure(Opaque, Opaque);
    TF_NumInputs(Opaque) -> c_int;
    TF_GetInput(Opaque, c_int, *mut Opaque, Opaque);
    TF_SetOutput(Opaque, c_int, Opaque, Opaque);
    TF_NewTensor(c_int, *const i64, c_int, *mut c_void, usize, Dealloc, *mut c_void) -> Opaque;
    TF_DeleteTensor(Opaque);
    TF_TensorType(Opaque) -> c_int;
    TF_NumDims(Opaque) -> c_int;
    TF_Dim(Opaque, c_int) -> i64;
    TF_TensorByteSize(Opaque) -> usize;
    TF_TensorData(Opaque) -> *mut c_void;
}

static FOUND: OnceLock<Interface> = OnceLock::new();

/// Resolves the functions in the TensorFlow that this process has loaded.
///
/// # Errors
/// No TensorFlow is loaded, or it lacks a required function, which the text names.
pub(crate) fn load() -> Result<&'static Interface, String> {
    if let Some(found) = FOUND.get() {
        return Ok(found);
    }
    let handles: Vec<_> = LIBRARIES
        .iter()
        // SAFETY: the name of a library; `RTLD_NOLOAD` loads nothing.
        .map(|name| unsafe { libc::dlopen(name.as_ptr(), libc::RTLD_NOW | libc::RTLD_NOLOAD) })
        .filter(|handle| !handle.is_null())
        .collect();
    if handles.is_empty() {
        let names: Vec<_> = LIBRARIES.iter().map(|name| name.to_string_lossy()).collect();
        return Err(format!("no TensorFlow is loaded (looked for {})", names.join(", ")));
    }
    let found = Interface::find(&handles)?;
    Ok(FOUND.get_or_init(|| found))
}

/// Returns the functions. Only for code that runs after [`load`] has succeeded: kernels and their values.
pub(crate) fn get() -> &'static Interface {
    match FOUND.get() {
        Some(found) => found,
        None => unreachable!("kernels run only after the functions are resolved"),
    }
}

fn find(handles: &[*mut c_void], name: &str) -> Result<*mut c_void, String> {
    let text = CString::new(name).map_err(|_| name.to_owned())?;
    handles
        .iter()
        // SAFETY: open handles and a string.
        .map(|&handle| unsafe { libc::dlsym(handle, text.as_ptr()) })
        .find(|found| !found.is_null())
        .ok_or_else(|| format!("this TensorFlow has no {name}: expected version 2.12 or newer"))
}

/// A `TF_Status` of one call.
pub(crate) struct Status(Opaque);

impl Status {
    pub(crate) fn new() -> Self {
        // SAFETY: allocates a status, which this value owns.
        Self(unsafe { (get().TF_NewStatus)() })
    }

    pub(crate) fn raw(&self) -> Opaque {
        self.0
    }

    pub(crate) fn set(&self, code: Code, text: &str) {
        // A C string cannot contain a null byte.
        let text = CString::new(text.replace('\0', " ")).unwrap_or_default();
        // SAFETY: a live status and a string, which is copied.
        unsafe { (get().TF_SetStatus)(self.0, code as c_int, text.as_ptr()) };
    }

    /// # Errors
    /// TensorFlow's error text.
    pub(crate) fn ok(&self) -> Result<(), String> {
        // SAFETY: a live status; the message is copied before it changes.
        unsafe {
            if (get().TF_GetCode)(self.0) == Code::Ok as c_int {
                return Ok(());
            }
            Err(CStr::from_ptr((get().TF_Message)(self.0)).to_string_lossy().into_owned())
        }
    }
}

impl Drop for Status {
    fn drop(&mut self) {
        // SAFETY: created by `TF_NewStatus`, deleted once.
        unsafe { (get().TF_DeleteStatus)(self.0) };
    }
}
