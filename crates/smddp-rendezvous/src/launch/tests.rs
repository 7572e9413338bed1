//! Tests with the environments of each launcher and of nested launchers.

use super::*;

fn detect(vars: &[(&str, &str)]) -> Result<LaunchEnvironment> {
    LaunchEnvironment::detect(
        &|name| vars.iter().find(|(n, _)| *n == name).map(|(_, v)| (*v).into()),
        None,
        77,
    )
}

fn address(vars: &[(&str, &str)]) -> (String, u16) {
    let address = detect(vars).unwrap().address.unwrap();
    (address.host, address.port)
}

const TORCHRUN: [(&str, &str); 5] = [
    ("RANK", "3"),
    ("WORLD_SIZE", "4"),
    ("LOCAL_RANK", "1"),
    ("MASTER_ADDR", "10.0.0.5"),
    ("MASTER_PORT", "29500"),
];

#[test]
fn without_a_launcher_there_is_one_rank() {
    assert_eq!(detect(&[]).unwrap(), LaunchEnvironment::single());
    assert_eq!(
        detect(&[("MASTER_PORT", "1234"), ("SLURM_NTASKS", "8")]).unwrap(),
        LaunchEnvironment::single()
    );
}

#[test]
fn all_torchrun_variables_are_read() {
    let address = RendezvousAddress { host: "10.0.0.5".into(), port: 29500, local: false };
    let want =
        LaunchEnvironment { rank: 3, size: 4, local_rank: Some(1), local_size: None, address: Some(address) };
    assert_eq!(detect(&TORCHRUN).unwrap(), want);
}

#[test]
fn port_of_torchruns_agent_is_not_used() {
    let mut vars = TORCHRUN.to_vec();
    vars.push(("TORCHELASTIC_USE_AGENT_STORE", "True"));
    assert_eq!(address(&vars).1, 29501);
    vars[4].1 = "65535";
    assert_eq!(address(&vars).1, 65534);
    vars[5].1 = "False";
    assert_eq!(address(&vars).1, 65535);
}

#[test]
fn local_mpi_ranks_need_no_address() {
    let openmpi = [
        ("OMPI_COMM_WORLD_RANK", "1"),
        ("OMPI_COMM_WORLD_SIZE", "2"),
        ("OMPI_COMM_WORLD_LOCAL_RANK", "1"),
        ("OMPI_COMM_WORLD_LOCAL_SIZE", "2"),
        ("PMIX_NAMESPACE", "prterun-host-1234@1"),
    ];
    let (host, port) = address(&openmpi);
    assert_eq!(host, "127.0.0.1");
    assert!((DERIVED_FIRST..32768).contains(&port));
    // Without a job name the launcher's process id is used.
    let mpich = [("PMI_RANK", "0"), ("PMI_SIZE", "2"), ("MPI_LOCALNRANKS", "2"), ("MPI_LOCALRANKID", "0")];
    assert_eq!(address(&mpich), ("127.0.0.1".into(), derived_port("77")));
}

#[test]
fn slurm_uses_its_first_host() {
    let slurm = [
        ("SLURM_PROCID", "5"),
        ("SLURM_NTASKS", "8"),
        ("SLURM_LOCALID", "1"),
        ("SLURM_JOB_ID", "99"),
        ("SLURM_STEP_NODELIST", "node[07-08,11],other1"),
    ];
    assert_eq!(address(&slurm).0, "node07");
    assert_eq!(detect(&slurm).unwrap().local_rank, Some(1));
    for (list, first) in [("a", "a"), ("a,b[1-2]", "a"), ("a[3,5]-x,b", "a3-x"), ("r[1-2]n[3-4]", "r1n3")] {
        assert_eq!(slurm::first_host(list), first);
    }
}

#[test]
fn slurm_local_size_is_read_from_the_task_list() {
    for (list, node, tasks) in [("4(x2),3", "0", 4), ("4(x2),3", "1", 4), ("4(x2),3", "2", 3), ("2", "0", 2)]
    {
        let vars = [
            ("SLURM_PROCID", "1"),
            ("SLURM_NTASKS", "2"),
            ("SLURM_JOB_ID", "9"),
            ("SLURM_JOB_NODELIST", "a"),
            ("SLURM_STEP_TASKS_PER_NODE", list),
            ("SLURM_NODEID", node),
        ];
        assert_eq!(detect(&vars).unwrap().local_size, Some(tasks), "{list} {node}");
    }
}

#[test]
fn sagemaker_address_is_its_first_host() {
    let mut vars = vec![
        ("OMPI_COMM_WORLD_RANK", "2"),
        ("OMPI_COMM_WORLD_SIZE", "4"),
        ("OMPI_COMM_WORLD_LOCAL_SIZE", "2"),
        ("PMIX_NAMESPACE", "job"),
        ("SM_HOSTS", r#"["algo-1","algo-2"]"#),
    ];
    assert_eq!(address(&vars).0, "algo-1");
    vars.extend([("SMDATAPARALLEL_SERVER_ADDR", "algo-9"), ("SMDATAPARALLEL_SERVER_PORT", "7592")]);
    assert_eq!(address(&vars), ("algo-9".into(), 7592));
    // mpirun passes them only to the ranks on its own host.
    vars.extend([("MASTER_ADDR", "algo-1"), ("MASTER_PORT", "7777")]);
    assert_eq!(address(&vars), ("algo-9".into(), 7592));
    vars.retain(|(name, _)| !name.starts_with("SMDATAPARALLEL"));
    assert_eq!(address(&vars), ("algo-1".into(), derived_port("job")));
}

#[test]
fn missing_or_invalid_variable_is_named() {
    let expect_error = |vars: &[(&str, &str)], name: &str| {
        let error = detect(vars).unwrap_err().to_string();
        assert!(error.contains(name), "{error}");
    };
    expect_error(&[("WORLD_SIZE", "2")], "RANK is not set");
    expect_error(&[("RANK", "0")], "WORLD_SIZE is not set");
    expect_error(&[("RANK", "0"), ("WORLD_SIZE", "2")], "MASTER_ADDR is not set");
    expect_error(&[("RANK", "0"), ("WORLD_SIZE", "2"), ("MASTER_ADDR", "h")], "MASTER_PORT is not set");
    expect_error(&[("RANK", "2"), ("WORLD_SIZE", "2")], "RANK is 2, but there are 2 ranks");
    expect_error(
        &[("RANK", "0"), ("WORLD_SIZE", "1000000000")],
        "WORLD_SIZE is 1000000000: expected at most",
    );
    expect_error(&[("RANK", "x"), ("WORLD_SIZE", "2")], "RANK is 'x'");
    expect_error(&[("PMI_RANK", "0"), ("PMI_SIZE", "2")], "MASTER_ADDR is not set");
    let mut vars = TORCHRUN.to_vec();
    vars[4].1 = "70000";
    expect_error(&vars, "MASTER_PORT is 70000");
}

#[test]
fn one_rank_needs_no_address() {
    assert_eq!(detect(&[("RANK", "0"), ("WORLD_SIZE", "1")]).unwrap().address, None);
}

/// (rank, size, local rank, ranks on this host)
type Place = (usize, usize, Option<usize>, Option<usize>);

const HYDRA: [(&str, &str); 4] =
    [("PMI_RANK", "3"), ("PMI_SIZE", "4"), ("MPI_LOCALRANKID", "1"), ("MPI_LOCALNRANKS", "2")];
const SRUN: [(&str, &str); 8] = [
    ("SLURM_PROCID", "3"),
    ("SLURM_NTASKS", "4"),
    ("SLURM_STEP_NUM_TASKS", "4"),
    ("SLURM_STEP_ID", "0"),
    ("SLURM_LOCALID", "1"),
    ("SLURM_NODEID", "1"),
    ("SLURM_STEP_TASKS_PER_NODE", "2(x2)"),
    ("SLURM_STEP_NODELIST", "n[1-2]"),
];
const PMI: [(&str, &str); 3] = [("PMI_RANK", "3"), ("PMI_SIZE", "4"), ("PMI_FD", "9")];
const PALS: [(&str, &str); 4] =
    [("PALS_RANKID", "3"), ("PALS_LOCAL_RANKID", "1"), ("PALS_APID", "a"), ("PMI_LOCAL_SIZE", "2")];
const FLUX: [(&str, &str); 5] = [
    ("FLUX_TASK_RANK", "3"),
    ("FLUX_JOB_SIZE", "4"),
    ("FLUX_TASK_LOCAL_ID", "1"),
    ("FLUX_JOB_NNODES", "2"),
    ("FLUX_JOB_ID", "77"),
];
const JSRUN: [(&str, &str); 4] = [
    ("JSM_NAMESPACE_RANK", "3"),
    ("JSM_NAMESPACE_SIZE", "4"),
    ("JSM_NAMESPACE_LOCAL_RANK", "1"),
    ("JSM_NAMESPACE_LOCAL_SIZE", "2"),
];
const BROKER: [(&str, &str); 4] =
    [("SLURM_PROCID", "0"), ("SLURM_STEP_NUM_TASKS", "2"), ("SLURM_STEP_ID", "0"), ("SLURM_LOCALID", "0")];
const MASTER: [(&str, &str); 2] = [("MASTER_ADDR", "n1"), ("MASTER_PORT", "29500")];

#[test]
fn each_launcher_sets_rank_and_local_rank() {
    let second_of_two: Place = (3, 4, Some(1), Some(2));
    let unknown: Place = (3, 4, None, None);
    for (launcher, sets, place) in [
        ("Hydra", vec![HYDRA.as_slice()], second_of_two),
        ("Hydra whose proxies are Slurm tasks", vec![&HYDRA, &BROKER], second_of_two),
        ("srun", vec![&SRUN], second_of_two),
        ("srun --mpi=pmi2", vec![&SRUN, &PMI], second_of_two),
        ("another process manager in a Slurm task", vec![&BROKER, &PMI], unknown),
        ("HPE PALS", vec![&PALS, &PMI], second_of_two),
        ("Flux", vec![&FLUX], (3, 4, Some(1), None)),
        ("Flux with PMI", vec![&FLUX, &PMI], (3, 4, Some(1), None)),
        ("Flux whose brokers are Slurm tasks", vec![&FLUX, &PMI, &BROKER], (3, 4, Some(1), None)),
        ("jsrun", vec![&JSRUN], second_of_two),
        ("PMI alone", vec![&PMI], unknown),
        ("PMI with a local rank", vec![&PMI, &[("PMI_LOCAL_RANK", "1")]], (3, 4, Some(1), None)),
        ("PMI with torch's local rank", vec![&PMI, &[("LOCAL_RANK", "1")]], (3, 4, Some(1), None)),
        ("RANK without LOCAL_RANK", vec![&[("RANK", "3"), ("WORLD_SIZE", "4")]], unknown),
    ] {
        let vars = [sets, vec![&MASTER]].concat().concat();
        let found = detect(&vars).unwrap();
        assert_eq!((found.rank, found.size, found.local_rank, found.local_size), place, "{launcher}");
        assert_eq!(found.address.unwrap().host, "n1", "{launcher}");
    }
}

#[test]
fn local_rank_follows_from_the_number_of_local_ranks() {
    let local = |count| {
        let vars = [("RANK", "3"), ("WORLD_SIZE", "4"), ("LOCAL_WORLD_SIZE", count)];
        detect(&[vars.as_slice(), &MASTER].concat()).unwrap().local_rank
    };
    assert_eq!((local("4"), local("1"), local("2")), (Some(3), Some(0), None));
    let one_host =
        [("FLUX_TASK_RANK", "1"), ("FLUX_JOB_SIZE", "2"), ("FLUX_JOB_NNODES", "1"), ("FLUX_JOB_ID", "5")];
    let found = detect(&one_host).unwrap();
    assert_eq!((found.local_rank, found.local_size), (Some(1), Some(2)));
    assert_eq!(found.address.unwrap().host, "127.0.0.1");
}

#[test]
fn missing_address_is_reported_with_the_launchers_command() {
    for (sets, command) in [
        (vec![HYDRA.as_slice()], "mpiexec -genv MASTER_ADDR HOST"),
        (vec![&PALS, &PMI], "mpiexec --env MASTER_ADDR="),
        (vec![&FLUX], "flux run --env=MASTER_ADDR=HOST"),
        (vec![&JSRUN], "jsrun -E MASTER_ADDR=HOST"),
        (vec![&BROKER, &PMI], "mpiexec -genv MASTER_ADDR HOST"),
    ] {
        let error = detect(&sets.concat()).unwrap_err().to_string();
        assert!(error.contains("MASTER_ADDR is not set") && error.contains(command), "{error}");
    }
}

#[test]
fn slurm_task_without_a_step_is_a_single_rank_or_an_error() {
    let batch = [("SLURM_PROCID", "0"), ("SLURM_LOCALID", "0"), ("SLURM_NODEID", "0"), ("SLURM_JOB_ID", "3")];
    assert_eq!(detect(&batch).unwrap().size, 1);
    assert_eq!(detect(&[batch.as_slice(), &[("SLURM_NTASKS", "1")]].concat()).unwrap().size, 1);
    let error = detect(&[batch.as_slice(), &[("SLURM_NTASKS", "4")]].concat()).unwrap_err().to_string();
    for part in ["SLURM_NTASKS is 4", "the other 3 ranks do not exist", "srun python script.py"] {
        assert!(error.contains(part), "{error}");
    }
    // A launcher inside the batch script, and an interactive step of one task.
    let hydra = [batch.as_slice(), &[("SLURM_NTASKS", "4")], &HYDRA, &MASTER].concat();
    assert_eq!(detect(&hydra).unwrap().rank, 3);
    let step = [("SLURM_NTASKS", "4"), ("SLURM_STEP_ID", "4294967290"), ("SLURM_STEP_NUM_TASKS", "1")];
    assert_eq!(detect(&[batch.as_slice(), &step].concat()).unwrap().size, 1);
}

#[test]
fn process_without_a_rank_in_a_job_of_several_is_an_error() {
    for (vars, part) in [
        ([("PET_NNODES", "2"), ("PET_NPROC_PER_NODE", "1")], "torchrun script.py"),
        ([("PMIX_RANK", "1"), ("PMIX_NAMESPACE", "job")], "no variable gives the number of ranks"),
    ] {
        let error = detect(&vars).unwrap_err().to_string();
        assert!(error.contains(part), "{error}");
    }
    assert_eq!(detect(&[("PET_NNODES", "1")]).unwrap(), LaunchEnvironment::single());
}
