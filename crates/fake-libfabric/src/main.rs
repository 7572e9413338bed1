//! Prints the path of the library for scripts: `SMDDP_LIBFABRIC=$(cargo run -q -p fake-libfabric)`.

fn main() {
    println!("{}", fake_libfabric::PATH);
}
