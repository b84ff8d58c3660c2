// Unpacks the browser of the npm package @sparticuz/chromium: node unpack_chromium.mjs PACKAGE FOLDER
import { createReadStream, createWriteStream, mkdirSync } from "node:fs";
import { spawn } from "node:child_process";
import { pipeline } from "node:stream/promises";
import { createBrotliDecompress } from "node:zlib";

const [source, folder] = process.argv.slice(2);
mkdirSync(folder, { recursive: true });
// Libraries that it needs, where the system has none, in lib/; and beside it what draws WebGL.
for (const name of ["al2023", "swiftshader"]) {
  const tar = spawn("tar", ["-x", "-C", folder], { stdio: ["pipe", "inherit", "inherit"] });
  await pipeline(createReadStream(`${source}/bin/${name}.tar.br`), createBrotliDecompress(), tar.stdin);
}
await pipeline(
  createReadStream(`${source}/bin/chromium.br`),
  createBrotliDecompress(),
  createWriteStream(`${folder}/chromium`, { mode: 0o755 }),
);
