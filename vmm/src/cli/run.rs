//! `banyan run`: flags of a machine, and how it is run.

use std::path::{Path, PathBuf};

use api::config::flags::FlagProblem;
use api::config::{
    CpuConfig, DeviceConfig, DiskConfig, KernelConfig, LogConfig, MemoryConfig, NumaConfig, NumaFlag, OutputConfig, Payload,
    PcieConfig, Size, TopologyConfig, VmConfig,
};
use clap::{ArgGroup, Args, ValueHint};

use super::virtio::VirtioArguments;
use super::{Action, CliError, RunOptions, keyed};

const BOOT: &str = "What boots";
const MACHINE: &str = "Machine";
const PCIE: &str = "PCI Express";
const RUN: &str = "Running and debugging";

#[derive(Debug, Args)]
#[command(group = ArgGroup::new("boots").required(true).multiple(true).args(["kernel", "firmware", "dry_run"]))]
#[expect(rustdoc::broken_intra_doc_links, reason = "brackets in texts of --help are no links")]
pub(super) struct RunArguments {
    /// Kernel to boot: ELF (PVH or 64-bit Linux protocol) or bzImage
    #[arg(long, value_name = "FILE", value_hint = ValueHint::FilePath, help_heading = BOOT)]
    kernel: Option<PathBuf>,

    /// Initial RAM file system for the kernel
    #[arg(long, value_name = "FILE", value_hint = ValueHint::FilePath, help_heading = BOOT, requires = "kernel")]
    initramfs: Option<PathBuf>,

    /// Kernel command line [default: empty]
    ///
    /// A Linux kernel writes to the serial port with `console=ttyS0`.
    #[arg(long, value_name = "TEXT", allow_hyphen_values = true, help_heading = BOOT, requires = "kernel")]
    cmdline: Option<String>,

    /// Guest address to load the kernel at [default: the kernel's own]
    ///
    /// A number or size, such as 0x2000000 or 32M. Refused for a kernel that cannot be moved.
    #[arg(long, value_name = "ADDRESS", help_heading = BOOT, requires = "kernel", allow_negative_numbers = true)]
    load_address: Option<Size>,

    /// Raw firmware image, started at the reset vector instead of a kernel
    ///
    /// The image ends at 4 GiB, so its last 16 bytes hold the first instruction.
    #[arg(long, value_name = "FILE", value_hint = ValueHint::FilePath, help_heading = BOOT)]
    #[arg(conflicts_with_all = ["kernel", "initramfs", "cmdline", "load_address"])]
    firmware: Option<PathBuf>,

    /// Processors, such as 4 [default: 1]; keys: boot, max, topology, kvm-signature
    ///
    ///   boot=N               at the start, 1 to 255; a bare N is enough
    ///                        [default: 1]
    ///   max=N                at most: those that `banyan ctl resize` adds
    ///                        while the guest runs [default: none]
    ///   topology=T:C:D:P     threads of a core, cores of a die, dies of a
    ///                        package, packages [default: one package of
    ///                        cores, or one for each memory node]
    ///   kvm-signature=on|off guests can tell that they run on KVM; without,
    ///                        NVIDIA's driver ignores cliques [default: on]
    #[arg(long, value_name = "N[,KEY=VALUE...]", value_parser = keyed::<CpuConfig>, help_heading = MACHINE)]
    #[arg(verbatim_doc_comment, allow_negative_numbers = true)]
    cpus: Option<CpuConfig>,

    /// Memory, such as 4G [default: 512M]; keys: size, hotplug, hotplug-method, shared, file, hugepages, prefault
    ///
    ///   size=SIZE            bytes, or with suffix K, M, G, T; a bare SIZE
    ///                        is enough [default: 512M]
    ///   hotplug=SIZE         that much more may come while the guest runs, by
    ///                        `banyan ctl resize`; the rest of a SIZE that is
    ///                        no multiple of 128M never does [default: none]
    ///   hotplug-method=acpi|virtio-mem
    ///                        acpi: it comes in multiples of 128M and stays;
    ///                        virtio-mem: it comes and goes in blocks of 2M, or
    ///                        more with hugepages=1G or above 64G [default: acpi]
    ///   shared=on|off        other processes can map it [default: off]
    ///   file=PATH            it is in this file, best in a tmpfs; with
    ///                        shared=on what the guest writes is there, and
    ///                        the file is made if need be; otherwise it
    ///                        begins with what is there
    ///   hugepages=off|2M|1G  from the host's huge pages [default: off];
    ///                        `on` with hugepage-size=2M or 1G is the same
    ///   prefault=on|off      touch every page at start [default: off]
    ///   prefault-threads=N   threads that do so [default: one for each
    ///                        processor, at most 16]
    #[arg(long, value_name = "SIZE[,KEY=VALUE...]", value_parser = keyed::<MemoryConfig>, help_heading = MACHINE)]
    #[arg(verbatim_doc_comment, allow_negative_numbers = true)]
    memory: Option<MemoryConfig>,

    /// Memory node of the guest (repeatable), or `host`; keys: id, cpus, memory, host-node, ...
    ///
    ///   host                 a node for each host node that a device is near
    ///                        to: memory and vCPUs from there, shared out
    ///                        evenly, distances as on the host
    ///   id=N                 number, from 0 on; a bare N is enough
    ///   cpus=0-3             its vCPUs; cpus=[0-3,8] for several runs
    ///   memory=SIZE          its part of --memory
    ///   host-node=N          host node that gives memory and processors
    ///   policy=bind|preferred memory from there alone, or as long as it
    ///                        lasts [default: bind]
    ///   pin=on|off           its vCPUs stay on the processors of the host
    ///                        node [default: on]
    ///   distance=N:D         to node N: 11 to 254; [1:20,2:30] for several
    ///                        [default: the host's, else 20]
    #[arg(long = "numa", value_name = "N[,KEY=VALUE...]", value_parser = keyed::<NumaFlag>, help_heading = MACHINE)]
    #[arg(verbatim_doc_comment)]
    numa: Vec<NumaFlag>,

    /// Serial port: stdio, file=PATH, pty, socket=PATH or off [default: stdio]
    ///
    ///   stdio (or tty)       standard input and output; on a terminal, Ctrl-A x
    ///                        ends the machine
    ///   file=PATH            output to this file, created or emptied
    ///   pty                  a new terminal; `banyan ctl info` and
    ///                        --log info tell its path
    ///   socket=PATH          a unix socket for one client at a time; what is
    ///                        printed while none is there waits, up to 1 MiB
    ///   off (or null)        the port is there, its output is dropped
    #[arg(long, value_name = "WHERE", value_parser = serial, help_heading = MACHINE, verbatim_doc_comment)]
    serial: Option<OutputConfig>,

    /// Disk image (repeatable), such as root.img; keys: path, readonly, format, ...
    ///
    ///   path=FILE            the image; a bare FILE is enough
    ///   readonly=on|off      [default: off]
    ///   id=NAME              name in trees [default: disk0, disk1, ...]
    ///   serial=TEXT          serial number, up to 20 characters
    ///   format=raw|qcow2     what the image is; never guessed [default: raw]
    ///   direct=on|off        past the host's page cache [default: off]
    ///   io=auto|uring|sync   raw images by io_uring, or by one call after
    ///                        another; auto: by io_uring where the host
    ///                        allows it [default: auto]
    ///   queues=N             request queues, 1 to 64 [default: 1]
    ///   queue-size=N         entries of each, a power of two [default: 256]
    ///   vhost-user=SOCKET    in place of path: a process that serves the disk
    ///                        listens there; beside it id, queues and
    ///                        queue-size. It maps the guest's memory: --memory
    ///                        shared=on
    #[arg(long = "disk", value_name = "FILE[,KEY=VALUE...]", value_parser = keyed::<DiskConfig>, help_heading = MACHINE)]
    #[arg(verbatim_doc_comment)]
    disks: Vec<DiskConfig>,

    #[command(flatten)]
    virtio: VirtioArguments,
    /// PCI device (repeatable): a host function such as 0000:03:00.0, or `stub`
    ///
    /// A host function that is bound to vfio-pci:
    ///   path=PATH            address, or folder in /sys/bus/pci/devices;
    ///                        a bare PATH is enough; /dev/vfio/N stands for
    ///                        all functions of IOMMU group N
    ///   cdi=VENDOR/CLASS=NAME device of a CDI file, which tells its function
    ///                        and clique; nvidia.com/gpu=gpu0 is enough
    ///   id=NAME              name in trees and texts [default: vfio0, ...]
    ///   clique=0..15         NVIDIA peer-to-peer clique: devices of one
    ///                        may reach each other
    ///   clique-any-vendor=on show it on any device, not only NVIDIA GPUs
    ///   p2p=on|off|0+2       BARs that other host functions reach by DMA
    ///   direct=on|off|0+2    BARs that the guest reaches without exits
    ///   on=NAME              port that it hangs on, of the topology file or
    ///                        of --pcie; `--dry-run -v` shows the names
    ///   device=N, function=N number on that bus: 0 to 31, 0 to 7 (below a port
    ///                        to 255, by alternative routing ids); without
    ///                        `on=`, a function above 0 is one of the device
    ///                        before it
    ///   attach=pci           no port of its own: a conventional bus behind
    ///                        a PCIe-to-PCI bridge for all such devices
    ///
    /// An emulated endpoint has the keys from id on, and these:
    ///   stub                 comes first
    ///   ids=VVVV:DDDD        vendor and device
    ///   subsystem=VVVV:DDDD  subsystem vendor and subsystem
    ///   class=BBSSII         class, subclass, interface, such as 030200
    ///   link="SPEED xWIDTH"  such as "16GT/s x16"
    ///   bar0=SIZE:KIND       to bar5; KIND is mem32, mem64 or io, with
    ///                        `:prefetchable` behind memory that is
    ///   rom=SIZE             expansion ROM, 2K to 16M [default: none]
    ///   vfs=N                SR-IOV capability with N virtual functions (1 to
    ///                        256), which the guest can enable below a port;
    ///                        vf-bars=[0:SIZE:KIND,...],
    ///                        vf-offset=N [default: 8], vf-stride=N [1],
    ///                        vf-device=DDDD [that of ids]
    ///   msix=N, msi=N        vectors, or
    ///   intx=A               pin A to D [default: no interrupt]
    ///   flr=on|off           function-level reset [default: on]
    ///   dma=on|off           copy engine and doorbell in the first page
    ///                        of BAR 0, and of VF BAR 0 [default: off]
    #[arg(long = "device", value_name = "DEVICE[,KEY=VALUE...]", value_parser = keyed::<DeviceConfig>, help_heading = PCIE)]
    #[arg(verbatim_doc_comment)]
    devices: Vec<DeviceConfig>,

    /// Directory with CDI files (repeatable, later ones win) [default: /etc/cdi, then /var/run/cdi]
    ///
    /// YAML and JSON files of the Container Device Interface, versions 0.3 to 1.0. Their annotations bdf, clique-id and
    /// attach-pci apply to devices given by path, too; keys of --device stand above them.
    #[arg(long = "cdi-dir", value_name = "DIR", value_hint = ValueHint::DirPath, help_heading = PCIE)]
    cdi_dirs: Vec<PathBuf>,

    /// Shape of the hierarchy; keys: topology, root-ports, switch-ports, cf8, ...
    ///
    ///   topology=root-ports  each behind its own root port [default]; a bare
    ///                        word in front, such as host, is enough
    ///   topology=switch      each behind a downstream port of a switch
    ///   topology=flat        all devices on the root bus
    ///   topology=host        as on the host: root ports and switches
    ///   gpu-order=request|topology
    ///                        with topology=host: GPUs in the order given, or
    ///                        refused; or in any order that the host's tree
    ///                        allows [default: request]
    ///   host-ports=used|switches|all
    ///                        with topology=host: ports that take devices
    ///                        while the guest runs: none, those of the
    ///                        switches above the devices, or copies of all
    ///                        that the host has [default: used]
    ///   cliques=auto|root-complex|off
    ///                        GPUs of the host without `clique=` show one:
    ///                        those below one switch share it, or those
    ///                        below one root complex [default: auto]
    ///   nvlink=full|shared|off
    ///                        who sets up NVLink on a host with NVSwitches,
    ///                        as for `banyan check --nvlink`
    ///   cold-plug=PORT       what devices without `on=` and without a place
    ///                        on the host hang on: root-port, switch-port
    ///                        (those of switch-ports first), bridge-port (a
    ///                        conventional bus for all) or no-port
    ///   cf8=auto|on|off      configuration access by port 0xCF8 too
    ///                        [default: auto, on with firmware only]
    ///   mirror=on|off        configuration reads of emulated functions come
    ///                        from memory, without an exit [default: on]
    ///   ioeventfd=on|off     doorbells of virtio devices wake their threads
    ///                        without an exit to this process [default: on]
    ///   root-ports=N         this many root ports more, without devices:
    ///                        port0, port1, ...
    ///   switch-ports=N       a switch with this many ports without devices:
    ///                        switch0-port0, ...; switches=M makes M of them
    ///   bridges=N            this many PCIe-to-PCI bridges more: bridge0,
    ///                        ...; bridge-slots=M device numbers of each
    ///                        conventional bus take devices [default: 30]
    ///   hot-plug=KIND        which of these take devices while the guest
    ///                        runs (see `banyan ctl --help`): auto (all),
    ///                        root-port, switch-port, bridge-port (one bridge
    ///                        where bridges=N says no other number; ACPI tells
    ///                        the guest) or no-port
    ///   hotplug-mem=SIZE     what each keeps for a device above 4 GiB, and
    ///   hotplug-mem32=SIZE   below [default: what there is room for, at most
    ///                        1T and 32M]
    ///   hotplug-buses=N      bus numbers that each keeps [default: 1]; more
    ///                        are for virtual functions that need them
    ///   ports-on=first|all   root-ports and switches are on the first root
    ///                        complex, or on all in turn, at least one for
    ///                        each memory node [default: first]
    ///   removal=HOW          when devices leave ports: surprise (at once),
    ///                        orderly (once the guest has switched the slot
    ///                        off) or button (as orderly, an attention button
    ///                        asks the guest to do so) [default: surprise];
    ///                        from other buses always orderly
    ///   root-hot-plug=on     what comes without a port comes to the root bus
    ///   cold-removal=on      devices of the start that hang on no hot-plug port
    ///                        can leave: ACPI asks the guest
    ///   bus0-free=N          numbers of the root bus, 0 to 31, that stay free
    ///                        for it at the start: root ports share numbers if
    ///                        need be, other devices do not
    ///   virtio=bus0|ports    virtio devices of the start are on the root bus,
    ///                        disks first, or in the same order behind a root
    ///                        port each [default: bus0]
    #[arg(long, value_name = "KEY=VALUE...", value_parser = keyed::<PcieConfig>, help_heading = PCIE, verbatim_doc_comment)]
    pcie: Option<PcieConfig>,

    /// File with root complexes, ports and devices (TOML)
    ///
    ///   [[root-complex]]     name; segment, node, bus
    ///   [[port]]             name, on, kind (root-port, upstream-port,
    ///                        downstream-port, pcie-pci-bridge); device,
    ///                        function, ids, subsystem, link; hotplug = true
    ///                        for devices that come, with mem, mem32,
    ///                        buses, removal where they differ from --pcie
    ///   [[device]]           name, on and the keys of --device; the word
    ///                        stub is kind = "stub"
    #[arg(long, value_name = "FILE", value_hint = ValueHint::FilePath, help_heading = PCIE, verbatim_doc_comment)]
    topology: Option<PathBuf>,

    /// Print the planned hierarchy and start nothing; needs no kernel and no /dev/kvm, and refuses what a start would refuse
    ///
    /// Memory is not taken, so it does not notice that the host has too little of it, or too few huge pages.
    #[arg(long, help_heading = RUN)]
    dry_run: bool,

    /// With --dry-run: buses, windows and addresses, too
    #[arg(short, long, help_heading = RUN, requires = "dry_run")]
    verbose: bool,

    /// A file of `banyan topology record` in place of this host; its devices are emulated
    ///
    /// A guest that boots so has the hierarchy, ids, links and cliques that it would have on that host, on any machine. Its
    /// devices answer as functions with these ids and BARs, and do nothing.
    #[arg(long, value_name = "FILE", value_hint = ValueHint::FilePath, help_heading = RUN)]
    host: Option<PathBuf>,

    /// A reset by the guest ends the process (exit code 4) instead of starting it again
    #[arg(long, help_heading = RUN)]
    no_reboot: bool,

    /// Socket for `banyan ctl` and other clients of the HTTP API
    #[arg(long, value_name = "PATH", value_hint = ValueHint::FilePath, help_heading = RUN)]
    api_socket: Option<PathBuf>,

    /// Print the number of exits of each kind at the end, on standard error
    #[arg(long, help_heading = RUN)]
    counters: bool,

    /// What is logged, such as debug; keys: level, file [default: warn, to standard error]
    ///
    ///   level=LEVEL          off, error, warn, info, debug or trace;
    ///                        a bare LEVEL is enough
    ///   file=PATH            append to this file
    #[arg(long, value_name = "LEVEL[,KEY=VALUE...]", value_parser = keyed::<LogConfig>, help_heading = RUN)]
    #[arg(verbatim_doc_comment)]
    log: Option<LogConfig>,

    /// Debug console at port 0xE9, with the places of --serial [default: no such port]
    #[arg(long, value_name = "WHERE", value_parser = debug_console, help_heading = RUN)]
    debug_console: Option<OutputConfig>,

    /// A guest's write of N to port 0xF4 ends the process with exit code 2 * N + 1
    #[arg(long, help_heading = RUN)]
    debug_exit: bool,
}

impl RunArguments {
    /// The machine, and what is done with it. Reads the topology file, if one is named.
    pub(super) fn action(self) -> Result<Action, CliError> {
        let topology = self.topology.as_deref().map(read_topology).transpose()?;
        let payload = match (self.kernel, self.firmware) {
            (Some(path), _) => Some(Payload::Kernel(KernelConfig {
                path,
                initramfs: self.initramfs,
                cmdline: self.cmdline.unwrap_or_default(),
                load_address: self.load_address.map(Size::bytes),
            })),
            (None, firmware) => firmware.map(Payload::Firmware),
        };
        let mut config = VmConfig {
            cpus: self.cpus.unwrap_or_default(),
            memory: self.memory.unwrap_or_default(),
            numa: NumaConfig::new(self.numa)?,
            payload,
            serial: self.serial.unwrap_or(OutputConfig::Stdio),
            debug_console: self.debug_console,
            debug_exit: self.debug_exit,
            pcie: self.pcie.unwrap_or_default(),
            topology,
            devices: self.devices,
            cdi_dirs: self.cdi_dirs,
            disks: self.disks,
            ..VmConfig::default()
        };
        self.virtio.apply(&mut config);
        let options = RunOptions {
            dry_run: self.dry_run,
            verbose: self.verbose,
            counters: self.counters,
            no_reboot: self.no_reboot,
            time_limit: None,
            log: self.log.unwrap_or_default(),
            api_socket: self.api_socket,
            host: self.host,
        };
        Ok(Action::Run { config: Box::new(config), options })
    }
}

/// A line for each of the 65536 functions of a segment fits.
const LARGEST_TOPOLOGY: u64 = 16 << 20;

fn read_topology(path: &Path) -> Result<TopologyConfig, CliError> {
    let unreadable = |source| CliError::Read { path: path.to_owned(), source };
    let text = crate::files::text(path, LARGEST_TOPOLOGY).map_err(unreadable)?;
    Ok(TopologyConfig::parse(&path.display().to_string(), &text)?)
}

fn serial(text: &str) -> Result<OutputConfig, FlagProblem> {
    OutputConfig::parse("--serial", text).map_err(|error| error.problem)
}

fn debug_console(text: &str) -> Result<OutputConfig, FlagProblem> {
    OutputConfig::parse("--debug-console", text).map_err(|error| error.problem)
}
