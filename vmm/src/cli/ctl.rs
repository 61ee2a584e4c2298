//! `banyan ctl`: what a person can ask of a process that runs.

use std::path::PathBuf;
use std::str::FromStr;

use api::config::flags::{FlagError, FlagProblem};
use api::config::{DeviceConfig, DiskConfig, FsConfig, NetConfig, Size, VsockConfig};
use clap::{Args, Subcommand, ValueHint};
use pci::errors::PcieError;

use super::keyed;

/// `banyan ctl`.
#[derive(Debug, Clone, PartialEq, Eq, Args)]
pub struct CtlOptions {
    /// Socket of the process, as given to it with --api-socket
    #[arg(long, value_name = "PATH", value_hint = ValueHint::FilePath)]
    pub api_socket: PathBuf,

    /// Print the reply as JSON instead of tables
    #[arg(long)]
    pub json: bool,

    /// What to do.
    #[command(subcommand)]
    pub command: CtlCommand,
}

/// What to do.
#[derive(Debug, Clone, PartialEq, Eq, Subcommand)]
pub enum CtlCommand {
    /// Print version and process id
    Ping,
    /// Print the machine's state and what it consists of
    Info,
    /// Print devices and ports with their addresses in the guest
    List,
    /// Print counters, such as exits by kind
    Counters,
    /// Print what happens to the machine, until the process ends or nobody reads
    ///
    /// A line for each event, or an object with --json: phase, progress, kernel-entered, reset, device-added, device-moved,
    /// device-removed, device-failed, device-error (the host reported one of the hardware), device-requested (the host wants the device
    /// back), guest-panic and ended, each with the reason where there is one; and lost: how many were missed, told to who reads too
    /// slowly.
    Events,
    /// Print the description of the HTTP API (OpenAPI)
    Openapi,
    /// Create a machine from a file with the JSON body of vm.create
    ///
    /// For a process that was started as `banyan --api-socket PATH`; `boot` then starts it. The body is that of Cloud
    /// Hypervisor's API. The smallest one: {"payload":{"kernel":"vmlinuz","cmdline":"console=ttyS0"}}
    Create {
        /// The file; - reads standard input
        #[arg(value_name = "FILE", value_hint = ValueHint::FilePath)]
        file: PathBuf,
    },
    /// Start the machine
    Boot,
    /// Hold the processors and emulated devices; functions of the host finish what they were told
    Pause,
    /// Let processors and devices go on
    Resume,
    /// Write the paused machine down, to be restored by another process
    ///
    /// Not with functions of the host, devices that another process serves, taps that came as descriptors, or --memory
    /// hotplug-method=virtio-mem. The files are config.json, which may be edited, state.json and memory-ranges, which has no memory
    /// that is shared in a file; only their owner can read them, and the guest's secrets are in them.
    Snapshot {
        /// A folder in which there is no snapshot
        #[arg(value_name = "DIR", value_hint = ValueHint::DirPath)]
        folder: PathBuf,
    },
    /// Make a machine that was written down; `resume`, or --resume, lets it go on
    ///
    /// For a process that was started as `banyan --api-socket PATH`. Without shared memory or huge pages RAM stays in the folder
    /// and is read when the guest uses it: the files must stay as they are while the machine is there, and machines from the
    /// same folder share what they do not change.
    Restore {
        /// The folder
        #[arg(value_name = "DIR", value_hint = ValueHint::DirPath)]
        folder: PathBuf,
        /// Read all memory first
        #[arg(long)]
        prefault: bool,
        /// Let it go on at once
        #[arg(long)]
        resume: bool,
    },
    /// Reset the machine; devices that were added stay
    Reboot,
    /// Press the power button: a guest that listens to it powers off
    PowerButton,
    /// End the guest and keep the machine, to be booted again as it was created
    Stop,
    /// End the guest and forget the machine
    Delete,
    /// End the guest and the process
    Shutdown,
    /// Add a device: a function of the host or a stub
    ///
    /// DEVICE is written as for `banyan run --device`: an address such as 0000:03:00.0 or the word stub, and keys such as id,
    /// on=PORT and clique. Without on it goes to the root bus with `--pcie root-hot-plug=on`, the default of machines of vm.create;
    /// else to a free hot-plug port, which `--pcie root-ports=N`, `switch-ports=N` and `host-ports=switches` make and `list` shows;
    /// else, or with attach=pci, to a conventional bus, of `hot-plug=bridge-port` or `bridges=N`. device=N names a device number of a
    /// bus. Disks, interfaces and other virtio devices come to no conventional bus. Several DEVICEs are the functions of one device,
    /// with numbers as `function` says, 0 among them: the guest finds all of them at once.
    ///
    /// Of the free ports with room for its BARs, a function of the host takes the nearest to where it is: with `topology=host` the copy
    /// of its own port, then one below the copy of its switch, then one of its root complex; else one on its memory node. Of equally
    /// near ones a device takes one that is no other device's place, of those the one that keeps least, of those the first.
    AddDevice {
        /// The device, as for `banyan run --device`, or its functions
        #[arg(value_name = "DEVICE", value_parser = keyed::<DeviceConfig>, num_args = 1..=8, required = true)]
        functions: Vec<DeviceConfig>,
    },
    /// Add a disk
    AddDisk {
        /// The disk, as for `banyan run --disk`, such as data.img,format=raw,id=data
        #[arg(value_name = "DISK", value_parser = boxed::<DiskConfig>)]
        disk: Box<DiskConfig>,
    },
    /// Add a network interface of a tap of the host, or of a vhost-user process; written as for `banyan run --net`
    AddNet {
        /// The interface, such as tap=tap0,id=net1
        #[arg(value_name = "NET", value_parser = boxed::<NetConfig>)]
        net: Box<NetConfig>,
    },
    /// Add a shared folder that a vhost-user process serves; written as for `banyan run --fs`
    AddFs {
        /// The folder, such as tag=shared,socket=/run/virtiofsd.sock
        #[arg(value_name = "FS", value_parser = boxed::<FsConfig>)]
        fs: Box<FsConfig>,
    },
    /// Add the socket device; written as for `banyan run --vsock`
    AddVsock {
        /// The device, such as cid=3,socket=/run/vsock.sock
        #[arg(value_name = "VSOCK", value_parser = boxed::<VsockConfig>)]
        vsock: Box<VsockConfig>,
    },
    /// Remove a device from its port or bus; before `boot`, from the machine that will be
    ///
    /// When it leaves a hot-plug port, `banyan run --pcie removal=HOW` decides: at once, or once the guest has let it go, at most
    /// 30 seconds later. From a root bus, a conventional bus or a port without a slot it always leaves when the guest has let it go;
    /// what was there from the start leaves root buses and such ports with `--pcie cold-removal=on`, which vm.create sets.
    RemoveDevice {
        /// Its name, as `list` shows it
        #[arg(value_name = "ID")]
        id: String,
    },
    /// Change the balloon, or the processors or memory of a machine with --cpus max=N or --memory hotplug=SIZE
    #[command(group = clap::ArgGroup::new("what").required(true).multiple(true))]
    Resize {
        /// Processors in all
        #[arg(long, value_name = "N", group = "what", value_parser = clap::value_parser!(u8).range(1..))]
        cpus: Option<u8>,
        /// Memory in all, such as 2G
        #[arg(long, value_name = "SIZE", group = "what")]
        memory: Option<Size>,
        /// Memory that the guest is asked to give back, such as 256M
        #[arg(long, value_name = "SIZE", group = "what")]
        balloon: Option<Size>,
    },
    /// Let a PCIe error happen at a device or port, to see what the guest makes of it
    ///
    /// The error is recorded in the AER registers of the device, or of the port above where the device has none. If software in
    /// the guest has enabled reports on the whole way, the root port's registers name the device, and it interrupts. Errors:
    /// receiver, bad-tlp, bad-dllp, replay-rollover, replay-timeout, advisory-non-fatal (correctable); data-link-protocol,
    /// poisoned-tlp, flow-control, completion-timeout, completer-abort, unexpected-completion, receiver-overflow,
    /// malformed-tlp, unsupported-request, acs-violation, internal (uncorrectable; masks and severities are the guest's).
    InjectError {
        /// Name of the device or port, as `list` shows it
        #[arg(value_name = "NAME")]
        at: String,
        /// The error
        #[arg(value_name = "ERROR", value_parser = str::parse::<PcieError>)]
        error: PcieError,
    },
}

fn boxed<T: FromStr<Err = FlagError>>(text: &str) -> Result<Box<T>, FlagProblem> {
    keyed(text).map(Box::new)
}

/// Text at the end of the long help.
pub(super) const NOTES: &str = "\
Exit codes:
  0  done
  1  refused or failed; standard error says why
  2  the command line is wrong
  3  nobody answers at the socket

Examples:
  A machine with two ports for devices that come later, and one that comes:
    banyan run --kernel vmlinuz --initramfs initrd.img \\
        --cmdline console=ttyS0 --pcie root-ports=2 --api-socket /run/vm.sock
    banyan ctl --api-socket /run/vm.sock add-device 0000:03:00.0,id=gpu0
    banyan ctl --api-socket /run/vm.sock list
    banyan ctl --api-socket /run/vm.sock remove-device gpu0

  For programs:
    banyan ctl --api-socket /run/vm.sock --json info
    curl --unix-socket /run/vm.sock http://localhost/api/v1/vm.info";
