//! Reads a device of the dialect: a function of the host, or with Banyan's key any device.

use std::path::PathBuf;

use serde::Deserialize;
use serde_json::{Value, json};

use super::json::{Notes, bad, read, refused};
use super::small::{missing, no_iommu, no_place};
use crate::config::flags::FlagError;
use crate::config::{BarChoice, CliqueId, DeviceConfig, DeviceError, DeviceKind, VfioConfig};
use crate::error::ApiError;

#[derive(Deserialize)]
#[serde(expecting = "an object")]
pub(super) struct DeviceBody {
    path: Option<PathBuf>,
    id: Option<String>,
    iommu: Option<bool>,
    pci_device_id: Option<u8>,
    x_nv_gpudirect_clique: Option<u8>,
    x_exclude_mmap_bars: Option<Vec<u8>>,
    banyan: Option<String>,
    #[serde(rename = "pci_segment")]
    _pci_segment: Option<u16>,
}

impl DeviceBody {
    pub(super) fn config(self, what: &str) -> Result<DeviceConfig, ApiError> {
        no_iommu(what, "iommu", self.iommu)?;
        no_place(what, "pci_device_id", self.pci_device_id)?;
        let clique = self.x_nv_gpudirect_clique.map(CliqueId::try_from).transpose();
        let clique = clique.map_err(|error: DeviceError| refused(what, "x_nv_gpudirect_clique", &error.to_string()))?;
        let excluded = self.x_exclude_mmap_bars.unwrap_or_default();
        let direct = BarChoice::without(&excluded).map_err(|error| refused(what, "x_exclude_mmap_bars", &error.to_string()))?;
        if let Some(flags) = self.banyan {
            if !excluded.is_empty() {
                return Err(refused(what, "x_exclude_mmap_bars", "`banyan` describes the whole device; write `direct=` there"));
            }
            if self.path.is_some() || self.id.is_some() || clique.is_some() {
                return Err(refused(what, "banyan", "it describes the whole device; leave out `path`, `id` and the clique"));
            }
            return flags.parse().map_err(|error: FlagError| bad(what, &error.to_string()));
        }
        let path = self.path.filter(|path| !path.as_os_str().is_empty()).ok_or_else(|| missing(what, "path"))?;
        Ok(DeviceConfig {
            id: self.id,
            on: None,
            device: None,
            function: 0,
            attach: None,
            clique,
            clique_any_vendor: false,
            direct,
            p2p: BarChoice::ALL,
            kind: DeviceKind::Vfio(VfioConfig { path }),
        })
    }
}

/// The body of vm.add-device: the functions of a device.
pub fn add_device(body: &[u8], notes: &Notes) -> Result<Vec<DeviceConfig>, ApiError> {
    const WHAT: &str = "vm.add-device";
    #[derive(Deserialize)]
    struct Functions {
        banyan: Vec<String>,
    }
    if serde_json::from_slice::<Value>(body).is_ok_and(|body| body["banyan"].is_array()) {
        let Functions { banyan } = read(WHAT, body, notes)?;
        if banyan.is_empty() || banyan.len() > 8 {
            return Err(refused(WHAT, "banyan", &format!("{} functions are no device; 1 to 8 are", banyan.len())));
        }
        return banyan.iter().map(|flags| flags.parse().map_err(|error: FlagError| bad(WHAT, &error.to_string()))).collect();
    }
    Ok(vec![read::<DeviceBody>(WHAT, body, notes)?.config(WHAT)?])
}

/// A body of vm.add-device that means the device with these functions.
#[must_use]
pub fn device_body(functions: &[DeviceConfig]) -> Value {
    match functions {
        [only] => json!({ "banyan": only.to_string() }),
        several => json!({ "banyan": several.iter().map(ToString::to_string).collect::<Vec<_>>() }),
    }
}
