use super::*;

fn parsed(text: &str) -> Result<Vec<Entry>, CdiFileError> {
    parse(Path::new("/etc/cdi/test.yaml"), text)
}

fn with_device(version: &str, device: &str) -> String {
    format!("cdiVersion: {version}\nkind: nvidia.com/gpu\ndevices:\n- name: gpu0\n{device}")
}

#[test]
fn a_device_has_its_vfio_nodes_and_annotations() {
    let text = with_device(
        "\"0.6.0\"",
        "  annotations: {bdf: \"0000:41:00.0\", clique-id: \"3\", attach-pci: \"false\", vendor.com/other: x}\n  containerEdits:\n    \
         env: [A=B]\n    deviceNodes:\n    - path: /dev/vfio/vfio\n    - {path: /dev/a, hostPath: /dev/vfio/71, type: c}\n    \
         - path: /dev/vfio/devices/vfio3\n    - path: /dev/nvidia0\n",
    );
    let entries = parsed(&text).unwrap();
    let [entry] = entries.as_slice() else { panic!("{entries:?}") };
    assert_eq!((entry.name.to_string().as_str(), entry.source.line), ("nvidia.com/gpu=gpu0", 4));
    assert_eq!(entry.nodes, [VfioNode::Group(71), VfioNode::Device("vfio3".into())]);
    let annotations = entry.annotations.clone().unwrap();
    assert_eq!(annotations.bdf, "41:00.0".parse().ok());
    assert_eq!((annotations.clique.map(CliqueId::get), annotations.attach_pci), (Some(3), Some(false)));
}

#[test]
fn annotations_of_the_file_are_defaults_of_its_devices() {
    let text = "cdiVersion: 1.0.0\nkind: a.com/b\nannotations: {clique-id: 1, attach-pci: true}\ndevices:\n- name: x\n  annotations: \
                {clique-id: 2}\n- name: y\n";
    let entries = parsed(text).unwrap();
    let cliques: Vec<_> = entries.iter().map(|entry| entry.annotations.clone().unwrap()).collect();
    assert_eq!(cliques.iter().map(|a| a.clique.map(CliqueId::get)).collect::<Vec<_>>(), [Some(2), Some(1)]);
    assert!(cliques.iter().all(|a| a.attach_pci == Some(true)));
}

#[test]
fn json_is_read_like_yaml() {
    let json = "{\"cdiVersion\": \"0.5.0\", \"kind\": \"a.com/b\", \"devices\": [{\"name\": \"0\", \"annotations\": {\"bdf\": \
                \"3d:00.0\"}, \"containerEdits\": {\"deviceNodes\": [{\"path\": \"/dev/vfio/66\"}]}}]}";
    let entries = parsed(json).unwrap();
    assert_eq!(entries[0].name.to_string(), "a.com/b=0");
    assert_eq!(entries[0].nodes, [VfioNode::Group(66)]);
}

#[test]
fn versions_from_0_3_to_1_0_are_read() {
    for version in ["0.3.0", "0.4.0", "0.5.0", "0.6.0", "0.7.0", "0.8.0", "0.8.1", "1.0.0", "1.0.1"] {
        assert!(parsed(&with_device(version, "")).is_ok(), "{version}");
    }
    for version in ["0.2.0", "0.9.0", "1.1.0", "2.0.0", "0.3", "0.3.0.0", "x", "\"\"", "-1.0.0", "0.99999999999.0"] {
        let error = parsed(&with_device(version, "")).unwrap_err();
        assert!(matches!(error.problem, Problem::Version { .. }) && error.at.line == 1, "{version}: {error}");
    }
}

#[test]
fn a_mistake_is_told_with_file_line_and_key() {
    for (text, part) in [
        ("kind: a.com/b\n".to_owned(), "test.yaml:1: key `cdiVersion` is missing"),
        ("[]".to_owned(), "test.yaml:1: `the file` must hold keys"),
        (
            "cdiVersion: 0.6.0\nkind: gpu\ndevices: [{name: x}]".to_owned(),
            "test.yaml:3: keys `kind` and `name`: `gpu=x` is no CDI name",
        ),
        ("cdiVersion: 0.6.0\nkind: a/b\ndevices: x".to_owned(), "test.yaml:3: `devices` must be a list"),
        ("cdiVersion: 0.6.0\nkind: a/b\ndevice: []".to_owned(), "test.yaml:3: key `device` is unknown; known here: cdiVersion"),
        (with_device("0.6.0", "- name: gpu0\n"), "test.yaml:5: device nvidia.com/gpu=gpu0 stands in line 4 already"),
        (with_device("0.6.0", "  anotations: {}\n"), "test.yaml:5: key `anotations` is unknown"),
        (with_device("0.6.0", "  annotations: [bdf]\n"), "test.yaml:5: `annotations` must hold keys"),
        (with_device("0.6.0", "  annotations: {bdf: [1]}\n"), "test.yaml:5: `bdf` must be a text"),
        (with_device("0.6.0", "  containerEdits: {deviceNode: []}\n"), "key `deviceNode` is unknown"),
        (with_device("0.6.0", "  containerEdits: {deviceNodes: [{hostPath: /x}]}\n"), "key `path` is missing"),
        (with_device("0.6.0", "  annotations: {bdf: \"\n"), "test.yaml:"),
    ] {
        let error = parsed(&text).unwrap_err().to_string();
        assert!(error.starts_with("CDI file /etc/cdi/test.yaml:") && error.contains(part), "{text}: {error}");
    }
}

#[test]
fn a_bad_annotation_spoils_its_device_and_no_other() {
    for (annotation, part) in [
        ("clique-id: 16", "annotation `clique-id` is `16`, and must be a whole number from 0 to 15"),
        ("clique-id: -1", "annotation `clique-id` is `-1`"),
        ("clique-id: one", "annotation `clique-id` is `one`"),
        ("clique-id: \"\"", "annotation `clique-id` is ``"),
        ("bdf: 41:00.9", "annotation `bdf` is `41:00.9`, and must be an address"),
        ("attach-pci: yes", "annotation `attach-pci` is `yes`, and must be true or false"),
        ("clique_id: 1", "annotation `clique_id` has no effect; write `clique-id`"),
        ("BDF: x", "annotation `BDF` has no effect; write `bdf`"),
    ] {
        let text = with_device("0.6.0", &format!("  annotations:\n    {annotation}\n- name: gpu1\n"));
        let entries = parsed(&text).unwrap();
        let error = entries[0].annotations.clone().unwrap_err();
        assert!(error.at.line == 6 && error.to_string().contains(part), "{annotation}: {error}");
        assert!(entries[1].annotations.is_ok());
    }
}

proptest::proptest! {
    #[test]
    fn no_text_makes_the_parser_panic(text in "[\\PC\\n\\t]{0,200}") {
        let _ = parsed(&text);
    }

    #[test]
    fn no_change_of_a_file_makes_the_parser_panic(at in 0usize..160, byte in 0u8..128) {
        let mut text = with_device("0.6.0", "  annotations: {bdf: \"41:00.0\"}\n  containerEdits:\n    deviceNodes:\n    - path: /dev/vfio/71\n").into_bytes();
        if let Some(slot) = text.get_mut(at) {
            *slot = byte;
        }
        let _ = parsed(&String::from_utf8_lossy(&text));
    }
}
