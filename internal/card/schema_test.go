package card

import (
	"encoding/json"
	"os"
	"slices"
	"testing"

	"github.com/goccy/go-yaml"
	"github.com/santhosh-tekuri/jsonschema/v6"

	"tagout/internal/yamlx"
)

const schemaFile = "../../deploy/schema/card-v1.json"

func loadSchema(t *testing.T) (map[string]any, *jsonschema.Schema) {
	t.Helper()
	f, err := os.Open(schemaFile)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = f.Close() })
	doc, err := jsonschema.UnmarshalJSON(f)
	if err != nil {
		t.Fatal(err)
	}
	compiler := jsonschema.NewCompiler()
	if err := compiler.AddResource("card.json", doc); err != nil {
		t.Fatal(err)
	}
	schema, err := compiler.Compile("card.json")
	if err != nil {
		t.Fatal(err)
	}
	return doc.(map[string]any), schema
}

// TestSchemaCases: whatever loads is right by the schema, and whatever the schema can express it refuses.
func TestSchemaCases(t *testing.T) {
	t.Parallel()
	_, schema := loadSchema(t)
	for _, c := range cases {
		err := validate(schema, []byte(c.card))
		if c.want == "" && err != nil {
			t.Errorf("%s: the schema refuses a card that loads: %v", c.name, err)
		}
		if c.inSchema != (err != nil) {
			t.Errorf("%s: refused by the schema: %v; want %v", c.name, err, c.inSchema)
		}
	}
	for _, file := range []string{"../../deploy/cards/practice.yaml", "../../deploy/cards/drill.yaml", "../../deploy/cards/tripwires.yaml"} {
		data, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		if err := validate(schema, data); err != nil {
			t.Errorf("%s: %v", file, err)
		}
	}
}

// validate goes through JSON, as an editor would.
func validate(schema *jsonschema.Schema, card []byte) error {
	var v any
	if err := yaml.UnmarshalWithOptions(card, &v, yaml.AllowDuplicateMapKey()); err != nil {
		return err
	}
	raw, err := json.Marshal(v)
	if err != nil {
		return err
	}
	var plain any
	if err := json.Unmarshal(raw, &plain); err != nil {
		return err
	}
	return schema.Validate(plain)
}

// TestSchemaKeys: the schema has exactly the keys that Parse knows, and refuses all others.
func TestSchemaKeys(t *testing.T) {
	t.Parallel()
	doc, _ := loadSchema(t)
	property := func(name string) any { return doc["properties"].(map[string]any)[name] }
	def := func(name string) any { return doc["$defs"].(map[string]any)[name] }
	for what, c := range map[string]struct {
		schema any
		keys   []yamlx.Key
	}{
		"card":       {doc, cardKeys},
		"egress":     {property("egress"), egressKeys},
		"filesystem": {property("filesystem"), filesystemKeys},
		"identity":   {property("identity"), identityKeys},
		"limits":     {property("limits"), limitKeys},
		"stop":       {property("stop"), stopKeys},
		"allow":      {def("allow"), allowKeys},
		"deny":       {def("deny"), denyKeys},
		"reach":      {def("reach"), reachKeys},
		"max_bytes":  {def("allow").(map[string]any)["properties"].(map[string]any)["max_bytes"], bytesKeys},
		"input":      {def("input"), inputKeys},
		"secret":     {def("secret"), secretKeys},
		"mint":       {def("mint"), mintKeys},
		"notKey":     {def("notKey"), notKeyKeys},
		"trip":       {def("trip"), tripKeys},
		"lease":      {property("stop").(map[string]any)["properties"].(map[string]any)["lease"], leaseKeys},
	} {
		object := c.schema.(map[string]any)
		if object["additionalProperties"] != false {
			t.Errorf("%s: the schema allows unknown keys", what)
		}
		var got, want []string
		for name := range object["properties"].(map[string]any) {
			got = append(got, name)
		}
		for _, k := range c.keys {
			want = append(want, k.Name)
		}
		slices.Sort(got)
		slices.Sort(want)
		if !slices.Equal(got, want) {
			t.Errorf("%s: the schema has %v, the code %v", what, got, want)
		}
	}
}

// TestSchemaNumbers: defaults and bounds are the code's.
func TestSchemaNumbers(t *testing.T) {
	t.Parallel()
	doc, _ := loadSchema(t)
	at := func(path ...string) any {
		var v any = doc
		for _, key := range path {
			v = v.(map[string]any)[key]
		}
		if n, ok := v.(json.Number); ok {
			f, err := n.Float64()
			if err != nil {
				t.Fatal(err)
			}
			return f
		}
		return v
	}
	for _, c := range []struct {
		got, want any
	}{
		{at("properties", "limits", "properties", "pids", "minimum"), float64(minPIDs)},
		{at("properties", "limits", "properties", "pids", "maximum"), float64(maxPIDs)},
		{at("properties", "limits", "properties", "pids", "default"), float64(defaultPIDs)},
		{at("properties", "limits", "properties", "openFiles", "minimum"), float64(minOpenFiles)},
		{at("properties", "limits", "properties", "openFiles", "maximum"), float64(maxOpenFiles)},
		{at("properties", "limits", "properties", "openFiles", "default"), float64(defaultOpenFiles)},
		{at("properties", "limits", "properties", "cpus", "minimum"), minCPUs},
		{at("properties", "limits", "properties", "cpus", "maximum"), maxCPUs},
		{at("properties", "limits", "properties", "cpus", "default"), defaultCPUs},
		{at("$defs", "allow", "properties", "rate", "minimum"), float64(minRate)},
		{at("properties", "stop", "properties", "trip", "maxItems"), float64(maxTrips)},
		{at("$defs", "paths", "maxItems"), float64(maxTripWords)},
		{at("$defs", "paths", "items", "pattern"), pathRE.String()},
		{at("$defs", "allow", "properties", "rate", "maximum"), float64(maxRate)},
		{at("properties", "limits", "properties", "memory", "default"), yamlx.FormatSize(defaultMemory)},
		{at("properties", "filesystem", "properties", "workspace", "default"), yamlx.FormatSize(defaultWorkspace)},
		{at("properties", "filesystem", "properties", "tmp", "default"), yamlx.FormatSize(defaultTmp)},
		{at("properties", "limits", "properties", "diskRate", "default"), yamlx.FormatSize(defaultDiskRate)},
		{at("properties", "name", "pattern"), nameRE.String()},
		{at("$defs", "secretName", "pattern"), secretRE.String()},
		{at("$defs", "variable", "pattern"), envRE.String()},
		{at("$defs", "mint", "properties", "audience", "pattern"), audienceRE.String()},
		{at("$defs", "mint", "properties", "scope", "items", "pattern"), scopeRE.String()},
		{at("$defs", "mint", "properties", "scope", "maxItems"), float64(maxScope)},
		{at("$defs", "mint", "properties", "hosts", "maxItems"), float64(maxMintHosts)},
		{at("properties", "identity", "properties", "mint", "maxItems"), float64(maxMints)},
		{at("$defs", "size", "pattern"), yamlx.SizePattern},
		{at("$defs", "input", "properties", "mode", "pattern"), modeRE.String()},
	} {
		if c.got != c.want {
			t.Errorf("the schema says %v, the code %v", c.got, c.want)
		}
	}
}
