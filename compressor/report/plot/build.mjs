// Bundles the parts of Observable Plot that the report uses, with the licenses of all in front.
// Run `npm install` in a copy of this folder, then this; write the new hash into
// observable-plot.sha256.
import {build} from "esbuild";
import {readFileSync, readdirSync} from "node:fs";

const settings = {
  entryPoints: ["entry.js"],
  bundle: true,
  minify: true,
  format: "iife",
  globalName: "Plot",
  target: "es2020",
  outfile: "observable-plot.js",
};

const {metafile} = await build({...settings, write: false, metafile: true});
const [bundle] = Object.values(metafile.outputs);
const used = new Set();
for (const [file, {bytesInOutput}] of Object.entries(bundle.inputs)) {
  const found = file.match(/^node_modules\/((?:@[^/]+\/)?[^/]+)\//);
  if (found && bytesInOutput > 0) used.add(found[1]);
}

const owners = new Map();
for (const name of [...used].sort()) {
  const folder = `node_modules/${name}/`;
  const {version} = JSON.parse(readFileSync(`${folder}package.json`, "utf8"));
  const license = readdirSync(folder).find((file) => /^licen[cs]e/i.test(file));
  const text = readFileSync(folder + license, "utf8").replaceAll("*/", "* /").trim();
  owners.set(text, [...(owners.get(text) ?? []), `${name} ${version}`]);
}
const notices = [...owners].map(([text, names]) => `${names.join(", ")}\n\n${text}`);
const banner = `/*!\nA part of Observable Plot with what it needs.\n\n${notices.join("\n\n---\n\n")}\n*/`;
await build({...settings, banner: {js: banner}});
