//! The program `smddp-bench`.

fn main() {
    let spawn = std::env::current_exe()
        .map(|exe| vec![exe.to_string_lossy().into_owned()])
        .unwrap_or_else(|_| vec!["smddp-bench".into()]);
    std::process::exit(smddp_bench::main_from(std::env::args().skip(1).collect(), &spawn));
}
