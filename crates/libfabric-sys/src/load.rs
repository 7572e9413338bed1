//! Search for the shared object, and its loading.

use std::ffi::{CStr, CString, c_char, c_int, c_void};
use std::fmt;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use crate::types::{fi_fabric_attr, fi_info, fid_fabric};

/// The soname of libfabric 1.x and 2.x.
pub const SONAME: &str = "libfabric.so.1";

/// Directories of the EFA installer.
const INSTALLED: [&str; 2] = ["/opt/amazon/efa/lib", "/opt/amazon/efa/lib64"];

/// A version of libfabric, or of its interface.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Version {
    /// Major version.
    pub major: u16,
    /// Minor version.
    pub minor: u16,
}

impl Version {
    /// Creates a version.
    pub const fn new(major: u16, minor: u16) -> Self {
        Self { major, minor }
    }

    /// Returns the version in libfabric's packed format.
    pub const fn packed(self) -> u32 {
        (self.major as u32) << 16 | self.minor as u32
    }

    const fn unpack(packed: u32) -> Self {
        Self { major: (packed >> 16) as u16, minor: packed as u16 }
    }
}

impl fmt::Display for Version {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}", self.major, self.minor)
    }
}

/// The search rule that found a library.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Place {
    /// The caller named the file.
    Explicit,
    /// The process had it open already (another library uses it).
    Loaded,
    /// The EFA installer's directory.
    Installer,
    /// The dynamic loader's search path.
    Loader,
}

impl fmt::Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Explicit => "named by the caller",
            Self::Loaded => "already loaded",
            Self::Installer => "EFA installer's directory",
            Self::Loader => "loader path",
        })
    }
}

/// A failed attempt to open a library, with its reason.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Attempt {
    /// Path, or the soname that the dynamic loader resolves.
    pub path: PathBuf,
    /// Search rule that produced the path.
    pub place: Place,
    /// Reason of the failure.
    pub reason: String,
}

/// No libfabric could be opened.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub struct Missing {
    /// All attempts, in order.
    pub attempts: Vec<Attempt>,
}

impl fmt::Display for Missing {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("no libfabric found; tried:")?;
        for (i, l) in self.attempts.iter().enumerate() {
            let sep = if i == 0 { "" } else { ";" };
            write!(f, "{sep} {} ({}): {}", l.path.display(), l.place, l.reason)?;
        }
        Ok(())
    }
}

type GetInfo =
    unsafe extern "C" fn(u32, *const c_char, *const c_char, u64, *const fi_info, *mut *mut fi_info) -> c_int;
type DupInfo = unsafe extern "C" fn(*const fi_info) -> *mut fi_info;
type FreeInfo = unsafe extern "C" fn(*mut fi_info);
type Fabric = unsafe extern "C" fn(*mut fi_fabric_attr, *mut *mut fid_fabric, *mut c_void) -> c_int;
type StrError = unsafe extern "C" fn(c_int) -> *const c_char;
type GetVersion = unsafe extern "C" fn() -> u32;

/// An open libfabric. It stays loaded until the process exits: providers start threads and register handlers that do
/// not survive an unload.
#[derive(Clone, Debug)]
pub struct Library {
    path: PathBuf,
    place: Place,
    version: Version,
    pub(crate) getinfo: GetInfo,
    pub(crate) dupinfo: DupInfo,
    pub(crate) freeinfo: FreeInfo,
    pub(crate) fabric: Fabric,
    strerror: StrError,
}

impl Library {
    /// Opens the library. With `explicit` only that file is tried. Otherwise the order is: a library that the process has
    /// loaded already, the EFA installer's directories, the loader's search path.
    ///
    /// # Errors
    /// No file could be opened, or the opened files lack a function. The error lists all attempts.
    pub fn open(explicit: Option<&Path>) -> Result<Self, Missing> {
        let mut attempts = Vec::new();
        let mut attempt = |at: &Path, place: Place| match Self::load(at, place) {
            Ok(library) => Some(library),
            Err(reason) => {
                attempts.push(Attempt { path: at.to_owned(), place, reason });
                None
            }
        };
        let found = match explicit {
            Some(path) => attempt(path, Place::Explicit),
            None => attempt(Path::new(SONAME), Place::Loaded)
                .or_else(|| {
                    INSTALLED.iter().find_map(|dir| attempt(&Path::new(dir).join(SONAME), Place::Installer))
                })
                .or_else(|| attempt(Path::new(SONAME), Place::Loader)),
        };
        found.ok_or(Missing { attempts })
    }

    fn load(at: &Path, place: Place) -> Result<Self, String> {
        let name = CString::new(at.as_os_str().as_bytes()).map_err(|_| "not a path".to_owned())?;
        let mut flags = libc::RTLD_NOW | libc::RTLD_LOCAL;
        if place == Place::Loaded {
            flags |= libc::RTLD_NOLOAD;
        }
        // SAFETY: opening runs the initializers of a library that the caller or the system's administrator selected.
        // The handle is never closed.
        let handle = unsafe { libc::dlopen(name.as_ptr(), flags) };
        if handle.is_null() {
            return Err(if place == Place::Loaded { "not loaded".to_owned() } else { last_error() });
        }
        // SAFETY: the types match the functions of these names at these symbol versions (fabric.h).
        let (getinfo, dupinfo, freeinfo, fabric, strerror, version) = unsafe {
            (
                symbol::<GetInfo>(handle, c"fi_getinfo", c"FABRIC_1.3")?,
                symbol::<DupInfo>(handle, c"fi_dupinfo", c"FABRIC_1.3")?,
                symbol::<FreeInfo>(handle, c"fi_freeinfo", c"FABRIC_1.3")?,
                symbol::<Fabric>(handle, c"fi_fabric", c"FABRIC_1.1")?,
                symbol::<StrError>(handle, c"fi_strerror", c"FABRIC_1.0")?,
                symbol::<GetVersion>(handle, c"fi_version", c"FABRIC_1.0")?,
            )
        };
        // SAFETY: the function has no arguments and returns a number.
        let version = Version::unpack(unsafe { version() });
        let path = file_of(getinfo as *const c_void).unwrap_or_else(|| at.to_owned());
        Ok(Self { path, place, version, getinfo, dupinfo, freeinfo, fabric, strerror })
    }

    /// Returns the path of the loaded file.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Returns the search rule that found the library.
    pub fn place(&self) -> Place {
        self.place
    }

    /// Returns the library's version.
    pub fn version(&self) -> Version {
        self.version
    }

    /// Returns the interface version to request: the library's version, at most 2.0, the newest version that [`crate::types`]
    /// covers.
    pub fn interface(&self) -> Version {
        self.version.min(Version::new(2, 0))
    }

    /// Returns the library's text for a positive error number.
    pub fn error(&self, number: i32) -> String {
        // SAFETY: the function has a number as argument and returns a static string or null.
        let text = unsafe { (self.strerror)(number) };
        if text.is_null() {
            return format!("error {number}");
        }
        // SAFETY: a null-terminated string of the library, which is never unloaded.
        unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned()
    }

    /// Opens a fabric.
    ///
    /// # Errors
    /// libfabric's error number, positive.
    ///
    /// # Safety
    /// `attr` points at the `fabric_attr` of a live `fi_info` of this library.
    pub unsafe fn open_fabric(&self, attr: *mut fi_fabric_attr) -> Result<*mut fid_fabric, i32> {
        let mut fabric = std::ptr::null_mut();
        // SAFETY: the contract of this function.
        let code = unsafe { (self.fabric)(attr, &raw mut fabric, std::ptr::null_mut()) };
        if code == 0 { Ok(fabric) } else { Err(-code) }
    }
}

/// # Safety
/// `F` is the type of the function of that name and version.
unsafe fn symbol<F: Copy>(handle: *mut c_void, name: &CStr, version: &CStr) -> Result<F, String> {
    // `dlsym` would resolve the newest version of a symbol, whose structures may differ from those of `types`.
    // SAFETY: an open handle and two null-terminated strings.
    let found = unsafe { libc::dlvsym(handle, name.as_ptr(), version.as_ptr()) };
    if found.is_null() {
        return Err(format!(
            "opened, but symbol {}@{} is missing: {}",
            name.to_string_lossy(),
            version.to_string_lossy(),
            last_error()
        ));
    }
    const { assert!(size_of::<F>() == size_of::<*mut c_void>()) };
    // SAFETY: the size is equal (asserted), and by the contract it is a function of this type.
    Ok(unsafe { std::mem::transmute_copy::<*mut c_void, F>(&found) })
}

fn last_error() -> String {
    // SAFETY: returns a string of this thread, or null.
    let text = unsafe { libc::dlerror() };
    if text.is_null() {
        return "unknown error".to_owned();
    }
    // SAFETY: null-terminated, and no loader function is called before the copy.
    unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned()
}

/// Returns the file that contains `function`.
fn file_of(function: *const c_void) -> Option<PathBuf> {
    let mut found = std::mem::MaybeUninit::<libc::Dl_info>::zeroed();
    // SAFETY: fills the structure, or returns 0.
    let code = unsafe { libc::dladdr(function, found.as_mut_ptr()) };
    // SAFETY: all zeros is a valid `Dl_info`.
    let found = unsafe { found.assume_init() };
    if code == 0 || found.dli_fname.is_null() {
        return None;
    }
    // SAFETY: null-terminated; the loader owns the string while the library is open.
    let name = unsafe { CStr::from_ptr(found.dli_fname) };
    Some(PathBuf::from(std::ffi::OsStr::from_bytes(name.to_bytes())))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions_compare_and_pack_in_libfabrics_format() {
        assert_eq!(Version::unpack(0x0001_0011), Version::new(1, 17));
        assert_eq!(Version::new(2, 0).packed(), 0x0002_0000);
        assert!(Version::new(1, 18) < Version::new(2, 0));
    }

    #[test]
    fn explicit_path_disables_the_search() {
        let missing = Library::open(Some(Path::new("/nowhere/libfabric.so.1"))).unwrap_err();
        assert_eq!(missing.attempts.len(), 1);
        let text = missing.to_string();
        assert!(text.contains("/nowhere/libfabric.so.1 (named by the caller)"), "{text}");
    }

    #[test]
    fn library_without_the_symbols_is_rejected() {
        let missing = Library::open(Some(Path::new("libc.so.6"))).unwrap_err();
        assert!(missing.attempts[0].reason.contains("fi_getinfo@FABRIC_1.3"), "{missing}");
    }
}
